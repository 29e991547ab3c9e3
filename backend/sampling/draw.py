"""What is drawn at a masked position: a token and the model's confidence in it."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.sampling.seeds import Counters, uniform


def top_probability(logits: Tensor) -> Tensor:
    """The probability [N] of the arg max of float32 `logits` [N, V].

    NaN where a row holds NaN, +inf or nothing finite.
    """
    return logits.softmax(dim=-1).amax(dim=-1)


def token_probability(logits: Tensor, token: Tensor) -> Tensor:
    """The probability [N] of `token` [N] in softmax(logits [N, V]).

    Un-noised, whatever temperature it was drawn at, as in LLaDA's `generate.py`.
    """
    return logits.log_softmax(dim=-1).gather(1, token[:, None]).squeeze(1).exp()


def tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """softmax(logits / temperature), float64 [N, V], of `logits` [N, V] and `temperature` float64 [N] above 0."""
    wide = logits.double()
    # Less the largest first: divided by a tiny temperature all of them could be infinite.
    return ((wide - wide.amax(dim=-1, keepdim=True)) / temperature[:, None]).softmax(dim=-1)


def truncated(probabilities: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """What top-k, then top-p, then min-p leave of `probabilities` [N, V], summing to 1 again.

    The most likely token always stays; among equals the lower id is the more likely one.

    Args:
        top_k: int64 [N], so many most likely tokens stay.
        top_p: [N], of these the fewest whose share reaches it; 1 keeps all.
        min_p: [N], of these the ones at least so likely as this share of the most likely one.
    """
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    keep = torch.arange(ranked.shape[1], device=ranked.device) < top_k[:, None]
    ranked = ranked * keep
    before = ranked.cumsum(dim=-1) - ranked
    # At 1 by itself: the sums are rounded, and would drop the least likely tokens.
    keep &= (before < top_p[:, None] * ranked.sum(dim=-1, keepdim=True)) | (top_p[:, None] >= 1)
    keep &= ranked >= min_p[:, None] * ranked[:, :1]
    keep[:, 0] = True
    kept = torch.zeros_like(ranked).scatter_(1, order, ranked * keep)
    return kept / kept.sum(dim=-1, keepdim=True)


def sample(probabilities: Tensor, counters: Counters) -> Tensor:
    """Tokens [N] drawn from `probabilities` [N, V], never one whose probability is 0.

    `counters`: int64 [N] each.
    """
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = uniform(*counters)[:, None] * total
    target = target.minimum(total.nextafter(torch.zeros_like(total)))  # rounding must not lead past the last one
    # A row of NaN has no place for its target; it is failed by its confidence.
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=probabilities.shape[1] - 1)
