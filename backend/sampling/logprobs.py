"""How likely committed tokens were, and which others were likely there."""

from __future__ import annotations

from torch import Tensor

from backend.core.logprobs import TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON has not, as in OpenAI's API."""


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> list[TokenLogprobs]:
    """Of `tokens` int64 [M] in softmax(logits), with the `num_top` most likely ones; equals by id.

    `logits` float32 [M, V], -inf where a token is no candidate.
    """
    logprobs = logits.log_softmax(dim=-1).clamp(min=LOWEST)
    own = logprobs.gather(1, tokens[:, None]).squeeze(1).tolist()
    if not num_top:
        return [TokenLogprobs(logprob) for logprob in own]
    ranked, order = logprobs.sort(dim=-1, descending=True, stable=True)  # topk leaves the order of equals open
    ids, shares = order[:, :num_top].tolist(), ranked[:, :num_top].tolist()
    return [
        TokenLogprobs(logprob, tuple(zip(top, share, strict=True)))
        for logprob, top, share in zip(own, ids, shares, strict=True)
    ]
