"""Who gets unmasked: which of the block's masked positions are committed in this step.

B requests, L positions of the longest block. A confidence is negative where a position is no
candidate. Plain numpy: a few hundred numbers a step, wherever the logits were computed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def quota(block_length: int, steps_per_block: int, step: int) -> int:
    """Positions to commit in `step` so that the block takes `steps_per_block`; at least one.

    The remainder goes to the earliest steps (LLaDA's `get_num_transfer_tokens`).
    """
    base, remainder = divmod(block_length, steps_per_block)
    return max(base + (step < remainder), 1)


def by_threshold(confidence: NDArray[np.float32], threshold: NDArray[np.float32]) -> NDArray[np.bool_]:
    """All candidates at or above their row's `threshold` [B], and always the best one (Fast-dLLM).

    `confidence` [B, L]; among equals the leftmost is the best. Returns bool [B, L].
    """
    chosen = confidence >= threshold[:, None]
    chosen[np.arange(len(chosen)), confidence.argmax(axis=1)] = True
    return chosen


def by_quota(confidence: NDArray[np.float32], count: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The `count` [B] most confident candidates of each row; among equals the leftmost.

    `confidence` [B, L]. Returns bool [B, L].
    """
    order = np.argsort(-confidence, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(order.shape[1])[None, :], axis=1)
    return (rank < count[:, None]) & (confidence >= 0)
