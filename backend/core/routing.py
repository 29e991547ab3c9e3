"""Where a prefill goes: pure decisions on its size and the loads of the workers (paper, Algorithm 2)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from backend.core.worker_pool import WorkerLoad, WorkerPool


class RouteKind(enum.Enum):
    """What the worker is to do with the block.

    PREFILL: prefill it and keep its KV for a colocated worker. COLOCATED: prefill and denoise it.
    DECODE: read its KV from the prefill worker and denoise it.
    """

    PREFILL = enum.auto()
    COLOCATED = enum.auto()
    DECODE = enum.auto()

    __hash__ = object.__hash__  # Enum's own is Python code


@dataclass(slots=True)  # frozen, it would take three times as long to make
class Route:
    load: WorkerLoad
    kind: RouteKind


@dataclass(slots=True)
class Prefill:
    """An arrival or a refresh to be placed.

    Attributes:
        num_tokens: prompt + canvas, what is computed and what the KV takes.
        prompt_tokens: the prompt alone.
        arrival_time: of its request.
        previous: how the request's block before this one was routed; None at arrival.
        is_local_only: to be denoised where it is prefilled, since a transfer of this block has failed.
    """

    num_tokens: int
    prompt_tokens: int = 0
    arrival_time: float = 0.0
    previous: RouteKind | None = None
    is_local_only: bool = False


class Policy(Protocol):
    """Chooses among the workers in the pools, which are neither draining nor lost."""

    def route(self, prefill: Prefill, prefill_pool: WorkerPool, colocated_pool: WorkerPool) -> Route | None:
        """The worker for `prefill`, or None if it has to wait until load or memory frees somewhere."""
        ...


class ColocatedPolicy:
    """Least outstanding prefill tokens; every arrival and every refresh alike (paper section 4.3).

    Workers queue what does not fit yet: each has its own queue and budget.
    """

    def route(self, prefill: Prefill, prefill_pool: WorkerPool, colocated_pool: WorkerPool) -> Route | None:
        load = colocated_pool.least_loaded_ever(prefill.num_tokens)
        return Route(load, RouteKind.COLOCATED) if load else None


class HybridPolicy:
    """Algorithm 2: the prefill pool first, overflow onto the colocated pool when that is saturated.

    A worker is chosen only if it holds less than `overflow_threshold` outstanding prefill tokens and
    has the memory; on a colocated worker what is promised to pending decodes does not count as free.
    With an infinite threshold nothing overflows (pure disaggregation). Without a prefill worker that
    can hold the sequence at all, it is colocated serving.
    """

    def __init__(self, overflow_threshold: float) -> None:
        if not overflow_threshold > 0:
            raise ValueError(f"overflow_threshold={overflow_threshold} must be positive")
        self.overflow_threshold = overflow_threshold
        self._colocated = ColocatedPolicy()

    def route(self, prefill: Prefill, prefill_pool: WorkerPool, colocated_pool: WorkerPool) -> Route | None:
        tokens, threshold = prefill.num_tokens, self.overflow_threshold
        if prefill.is_local_only or prefill_pool.capacity_tokens < tokens:
            return self._colocated.route(prefill, prefill_pool, colocated_pool)
        load = prefill_pool.least_loaded(tokens, threshold)
        if load is not None:
            return Route(load, RouteKind.PREFILL)
        if threshold == float("inf"):
            return None
        load = colocated_pool.least_loaded(tokens, threshold)
        return Route(load, RouteKind.COLOCATED) if load else None


class ConditionalPolicy:
    """Dynamo's conditional disaggregation, as a baseline: decided once per request, by two numbers.

    A request whose prompt is longer than `max_local_prefill_length` is prefilled remotely, unless
    `max_prefill_queue_size` prefills wait for the prefill pool already; its refreshes go the same
    way. No threshold on anyone's load; the baseline's colocated workers have no budget either.
    """

    def __init__(self, max_local_prefill_length: int, max_prefill_queue_size: int) -> None:
        self.max_local_prefill_length = max_local_prefill_length
        self.max_prefill_queue_size = max_prefill_queue_size
        self._colocated = ColocatedPolicy()

    def route(self, prefill: Prefill, prefill_pool: WorkerPool, colocated_pool: WorkerPool) -> Route | None:
        is_remote = prefill.previous is RouteKind.PREFILL or (
            prefill.previous is None
            and prefill.prompt_tokens > self.max_local_prefill_length
            and prefill_pool.num_prefills < self.max_prefill_queue_size
        )
        if is_remote and not prefill.is_local_only and prefill_pool.capacity_tokens >= prefill.num_tokens:
            load = prefill_pool.least_loaded(prefill.num_tokens, float("inf"))
            return Route(load, RouteKind.PREFILL) if load else None
        return self._colocated.route(prefill, prefill_pool, colocated_pool)
