"""What is drawn at a masked position: a token and the model's confidence in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backend.sampling.seeds import uniform


def top_probability(logits: Tensor) -> Tensor:
    """The probability [N] of the arg max of float32 `logits` [N, V].

    NaN where a row holds NaN, +inf or nothing finite.
    """
    return logits.softmax(dim=-1).amax(dim=-1)


def sample(logits: Tensor, temperature: Tensor, counters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens [N] drawn from softmax(logits / temperature) and their probabilities [N] at temperature 1.

    The confidence stays un-noised, as in LLaDA's `generate.py`.

    Args:
        logits: float32 [N, V].
        temperature: float64 [N], above 0.
        counters: (seed, block, step, position), int64 [N] each.
    """
    scaled = logits.double() / temperature[:, None]
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1)
    target = uniform(*counters)[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)
    confidence = logits.log_softmax(dim=-1).gather(1, token[:, None]).squeeze(1).exp()
    return token, confidence
