"""Overflow by what it costs the decodes that it holds up (`overflow_threshold: auto`)."""

from __future__ import annotations

import math

from backend.core.routing import HybridPolicy, Prefill, Route
from backend.core.worker_pool import WorkerPool

DECODE_SHARE = 0.7
"""A prefill that queues delays, besides itself, those that come while it waits. Chosen on the simulator."""


class AutoHybridPolicy(HybridPolicy):
    """Algorithm 2 with a threshold for every prefill: where waiting costs as much as overflowing.

    In the prefill pool a prefill waits for the tokens ahead of it; where it overflows, it holds up each
    decode of the worker for as long as its own tokens take. So it overflows once every prefill worker
    has more outstanding than the least loaded colocated worker has, and `DECODE_SHARE` of the prefill's
    own tokens for every decode there.

    Attributes:
        overflow_threshold: the last decision's; infinite if no colocated worker had room.
    """

    def __init__(self) -> None:
        super().__init__(math.inf)

    def route(self, prefill: Prefill, prefill_pool: WorkerPool, colocated_pool: WorkerPool) -> Route | None:
        self.overflow_threshold = self._threshold(prefill.num_tokens, colocated_pool)
        return super().route(prefill, prefill_pool, colocated_pool)

    @staticmethod
    def _threshold(num_tokens: int, colocated_pool: WorkerPool) -> float:
        load = colocated_pool.least_loaded(num_tokens, math.inf)
        if load is None:
            return math.inf
        num_decodes = load.num_requests - load.num_prefills
        return load.outstanding_prefill_tokens + DECODE_SHARE * num_tokens * num_decodes + 1  # a tie is no overflow
