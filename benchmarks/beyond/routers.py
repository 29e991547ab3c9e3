"""Several routers over the same workers: each knows its own placements, and of the others what workers report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from backend.core.ledger import Dispatch
from backend.core.placer import Placer
from backend.core.routing import Policy, Prefill, Route
from backend.core.worker_pool import WorkerLoad, WorkerPool
from benchmarks.simulator.config import SimulatorConfig
from benchmarks.simulator.flight import Trip
from benchmarks.simulator.graph import Graph

_Account = tuple[int, int, int, int]
"""o_w, prefills, requests, used pages."""
_NOTHING: _Account = (0, 0, 0, 0)


class Informed(Placer):
    """A placer whose accounts also hold what other routers have at a worker, as far as it has been told."""

    def __init__(self, policy: Policy, assign: Callable[[Dispatch, Route], None]) -> None:
        super().__init__(policy, assign)
        self.loads: dict[int, WorkerLoad] = {}
        self._others: dict[int, _Account] = {}

    def show(self, load: WorkerLoad, pool: WorkerPool) -> None:
        self.loads[load.worker_id] = load
        super().show(load, pool)

    def own(self, worker_id: int) -> _Account:
        load = self.loads[worker_id]
        tokens, prefills, requests, used = self._others.get(worker_id, _NOTHING)
        return (
            load.outstanding_prefill_tokens - tokens,
            load.num_prefills - prefills,
            load.num_requests - requests,
            load.used_pages - used,
        )

    def told(self, worker_id: int, others: _Account) -> None:
        load, before = self.loads[worker_id], self._others.get(worker_id, _NOTHING)
        self._others[worker_id] = others
        tokens, prefills, requests, used = (new - old for new, old in zip(others, before, strict=True))
        load.change(tokens=tokens, prefills=prefills, requests=requests, used=used)
        self._freed(load)


class Routers(Placer):
    """One face for several placers: a request is its router's from its first block to its last.

    Its own pools hold the workers for their sizes; nothing is charged to them.
    """

    def __init__(self, policies: Sequence[Policy], assign: Callable[[Dispatch, Route], None]) -> None:
        super().__init__(policies[0], assign)
        self.placers = [Informed(policy, assign) for policy in policies]

    def _of(self, dispatch: Dispatch) -> Informed:
        return self.placers[int(dispatch[0]) % len(self.placers)]

    def show(self, load: WorkerLoad, pool: WorkerPool) -> None:
        super().show(load, pool)
        for placer in self.placers:
            own_pool = placer.prefill_pool if pool is self.prefill_pool else placer.colocated_pool
            placer.show(WorkerLoad(load.worker_id, load.num_pages, load.page_size), own_pool)

    def submit(self, dispatch: Dispatch, prefill: Prefill) -> None:
        self._of(dispatch).submit(dispatch, prefill)

    def prefilled(self, dispatch: Dispatch) -> None:
        self._of(dispatch).prefilled(dispatch)

    def hand_over(self, dispatch: Dispatch) -> None:
        self._of(dispatch).hand_over(dispatch)

    def source_freed(self, dispatch: Dispatch) -> None:
        self._of(dispatch).source_freed(dispatch)

    def done(self, dispatch: Dispatch) -> None:
        self._of(dispatch).done(dispatch)
        self.num_overflows = sum(placer.num_overflows for placer in self.placers)


class RoutersGraph(Graph):
    """Every worker reports to all routers at an interval, one worker after the other; see `SeveralRouters`."""

    def __init__(self, several: SeveralRouters, config: SimulatorConfig, *args: Any) -> None:
        self._num_routers, self._report_s = several.num_routers, several.report_s
        self._has_prefills = several.has_prefills
        self._is_reporting = False
        super().__init__(config, *args)

    def _placer(self, config: SimulatorConfig) -> Placer:
        self.routers = Routers([config.policy() for _ in range(self._num_routers)], self._assigned)
        return self.routers

    def arrive(self, trip: Trip) -> None:
        super().arrive(trip)
        if self._report_s is not None and not self._is_reporting:
            self._is_reporting = True
            self._report(0)

    def check(self) -> None:
        super().check()
        if num_charged := sum(len(placer.ledger) for placer in self.routers.placers):
            raise RuntimeError(f"{num_charged} blocks are charged for ever")

    def _report(self, worker_id: int) -> None:
        assert self._report_s is not None
        owns = [placer.own(worker_id) for placer in self.routers.placers]
        total = [sum(column) for column in zip(*owns, strict=True)]
        for placer, own in zip(self.routers.placers, owns, strict=True):
            tokens, prefills, requests, used = (all_of - part for all_of, part in zip(total, own, strict=True))
            if not self._has_prefills:
                tokens = prefills = 0
            self._clock.after(self._hop_s, placer.told, worker_id, (tokens, prefills, requests, used))
        self._is_reporting = bool(self._flights)
        if self._is_reporting:
            num_workers = len(self.workers)
            self._clock.after(self._report_s / num_workers, self._report, (worker_id + 1) % num_workers)


@dataclass(frozen=True)
class SeveralRouters:
    """Attributes:
    report_s: between two reports of a worker; None: there are none.
    has_prefills: reports tell o_w, not only how many requests and pages there are.
    """

    num_routers: int
    report_s: float | None
    has_prefills: bool = True

    def __call__(self, *args: Any) -> Graph:
        return RoutersGraph(self, *args)
