"""Who gets unmasked: which of the block's masked positions are committed in this step.

B requests, L positions of the longest block. A score is -inf where a position is no candidate; among
equals the leftmost counts as the better one. Plain numpy: a few hundred numbers a step, wherever the
logits were computed.

Every rule takes at least the best candidate, so that every step makes progress.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def by_threshold(score: NDArray[np.float32], threshold: NDArray[np.float32]) -> NDArray[np.bool_]:
    """All candidates at or above their row's `threshold` [B], and always the best one (Fast-dLLM).

    `score` [B, L]. Returns bool [B, L].
    """
    chosen = score >= threshold[:, None]
    chosen[np.arange(len(chosen)), score.argmax(axis=1)] = True
    return chosen


def by_factor(score: NDArray[np.float32], factor: NDArray[np.float64]) -> NDArray[np.bool_]:
    """From the best candidate on for as long as the n-th score is at least 1 - factor / (n + 1) (Fast-dLLM).

    The first always. Its reference code also takes the very last candidate when that one fails; this
    does not.

    `score` [B, L], `factor` [B]. Returns bool [B, L].
    """
    order = _ranking(score)
    rank = np.arange(1, score.shape[1] + 1)
    reaches = np.take_along_axis(score, order, axis=1) >= 1 - factor[:, None] / (rank + 1)
    reaches[:, 0] = True
    return _unranked(np.logical_and.accumulate(reaches, axis=1), order) & (score > -np.inf)


def by_quota(score: NDArray[np.float32], count: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The `count` [B] best candidates of each row.

    `score` [B, L]. Returns bool [B, L].
    """
    leads = np.arange(score.shape[1]) < count[:, None]
    return _unranked(leads, _ranking(score)) & (score > -np.inf)


def _ranking(score: NDArray[np.float32]) -> NDArray[np.int64]:
    """Positions of each row from the best to the worst."""
    return np.argsort(-score, axis=1, kind="stable")


def _unranked(ranked: NDArray[np.bool_], order: NDArray[np.int64]) -> NDArray[np.bool_]:
    """What was said of ranks, said of positions."""
    placed = np.empty_like(ranked)
    np.put_along_axis(placed, order, ranked, axis=1)
    return placed
