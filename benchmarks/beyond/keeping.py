"""Prefill workers that denoise what they have prefilled while nothing waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backend.core.page_pool import PagePool
from backend.core.prefill_scheduler import PrefillScheduler, PrefillSchedulerConfig
from backend.core.queries import num_query_tokens
from backend.core.request import Request, RequestStatus
from backend.core.step import StepPlan, StepResult
from benchmarks.simulator.graph import Graph


class KeepingScheduler(PrefillScheduler):
    """A block whose prefill leaves the queue empty is kept and denoised here, up to `max_kept` at once.

    Kept blocks are in every step; later prefills are not held back for them.
    """

    def __init__(self, config: PrefillSchedulerConfig, pool: PagePool, max_kept: int) -> None:
        super().__init__(config, pool)
        self.max_kept = max_kept
        self._kept: dict[str, Request] = {}

    def is_kept(self, request: Request) -> bool:
        return request.request_id in self._kept

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        plan = super().schedule(now)
        decodes = list(self._kept.values())
        if not decodes:
            return plan
        num_tokens = sum(num_query_tokens(request, logits_shift=0) for request in decodes)
        return StepPlan(plan.prefills if plan else (), decodes, num_tokens)

    def update(self, plan: StepPlan, result: StepResult) -> list[Request]:
        left: list[Request] = []
        ran: Sequence[Request] = (*plan.prefills, *plan.decodes)
        for request, commits in zip(ran, result.commits, strict=True):
            name = request.request_id
            if request.apply(commits):
                self._kept.pop(name, None)
                self._drop(request)
                left.append(request)
            elif request.status is RequestStatus.PREFILLING:
                if not self.num_waiting and len(self._kept) < self.max_kept:
                    request.transition(RequestStatus.DENOISING)
                    self._kept[name] = request
                else:
                    request.transition(RequestStatus.WAITING_FOR_KV)
                    self._num_held += 1
        return left


class KeepingGraph(Graph):
    def __init__(self, max_kept: int, *args: Any) -> None:
        super().__init__(*args)
        for worker in self.workers:
            if isinstance(worker.scheduler, PrefillScheduler):
                pool = worker.scheduler.pool
                worker.scheduler = KeepingScheduler(worker.scheduler.config, pool, max_kept)

    def stepped(self, plan: StepPlan, left: Sequence[Request]) -> None:
        for request in plan.prefills:
            flight = self._flights[request.request_id]
            scheduler = flight.source.scheduler if flight.source is not None else None
            if isinstance(scheduler, KeepingScheduler) and scheduler.is_kept(request):
                flight.source = None  # nobody has to read it
        super().stepped(plan, left)


@dataclass(frozen=True)
class Keeping:
    max_kept: int

    def __call__(self, *args: Any) -> Graph:
        return KeepingGraph(self.max_kept, *args)
