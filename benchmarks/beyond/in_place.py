"""Refreshes that stay: the worker that denoised a block takes the request's next one if it is the least loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backend.core.placer import Placer
from backend.core.routing import HybridPolicy, Prefill, Route, RouteKind
from backend.core.worker_pool import WorkerLoad, WorkerPool
from benchmarks.simulator.config import SimulatorConfig
from benchmarks.simulator.flight import Flight
from benchmarks.simulator.graph import Graph


@dataclass(slots=True)
class HeldPrefill(Prefill):
    """Attributes:
    holder: where the request's block before this one was denoised.
    """

    holder: WorkerLoad | None = None


class InPlacePolicy(HybridPolicy):
    """Algorithm 2, but first: the holder, if it is under the threshold, has room, and is the least loaded.

    Args:
        margin: tokens by which its o_w has to be below every prefill worker's; 0: ties are the holder's.
    """

    def __init__(self, overflow_threshold: float, margin: int) -> None:
        super().__init__(overflow_threshold)
        self.margin = margin

    def route(self, prefill: Prefill, prefill_pool: WorkerPool, colocated_pool: WorkerPool) -> Route | None:
        holder = prefill.holder if isinstance(prefill, HeldPrefill) else None
        if holder is not None and holder.pool is colocated_pool and holder.available_tokens >= prefill.num_tokens:
            o_w, tokens = holder.outstanding_prefill_tokens, prefill.num_tokens
            is_least = not (
                prefill_pool.least_loaded(tokens, o_w + self.margin) or colocated_pool.least_loaded(tokens, o_w)
            )
            if is_least and o_w < self.overflow_threshold:
                return Route(holder, RouteKind.COLOCATED)
        return super().route(prefill, prefill_pool, colocated_pool)


class InPlaceGraph(Graph):
    def __init__(self, margin: int, *args: Any) -> None:
        self._margin = margin
        super().__init__(*args)
        self._holders: dict[str, WorkerLoad] = {}

    def _placer(self, config: SimulatorConfig) -> Placer:
        return Placer(InPlacePolicy(float(config.overflow_threshold), self._margin), self._assigned)

    def _prefill(self, flight: Flight) -> Prefill:
        trip = flight.trip
        holder = self._holders.get(trip.name)
        return HeldPrefill(flight.num_tokens, len(trip.prompt), trip.due_s, trip.route, holder=holder)

    def _done(self, flight: Flight) -> None:
        assert flight.worker is not None
        self._holders[flight.trip.name] = flight.worker.load
        super()._done(flight)


@dataclass(frozen=True)
class InPlace:
    margin: int

    def __call__(self, *args: Any) -> Graph:
        return InPlaceGraph(self.margin, *args)
