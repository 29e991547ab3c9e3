"""Who gets unmasked: which of the block's masked positions are committed in this step."""

from __future__ import annotations

from torch import Tensor


def quota(block_length: int, steps_per_block: int, step: int) -> int:
    """Positions to commit in `step` so that the block takes `steps_per_block`; at least one.

    The remainder goes to the earliest steps (LLaDA's `get_num_transfer_tokens`).
    """
    base, remainder = divmod(block_length, steps_per_block)
    return max(base + (step < remainder), 1)


def by_threshold(confidence: Tensor, threshold: Tensor) -> Tensor:
    """All candidates at or above their row's `threshold` [B], and always the best one (Fast-dLLM).

    `confidence` [B, L] is negative where a position is no candidate. Returns bool [B, L].
    """
    chosen = confidence >= threshold[:, None]
    return chosen.scatter_(1, confidence.argmax(dim=1, keepdim=True), True)


def by_quota(confidence: Tensor, count: Tensor) -> Tensor:
    """The `count` [B] most confident candidates of each row; among equals the leftmost.

    `confidence` [B, L] is negative where a position is no candidate. Returns bool [B, L].
    """
    order = confidence.argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)
    return (rank < count[:, None]) & (confidence >= 0)
