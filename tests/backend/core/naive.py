"""Algorithm 2 written once more, from the paper and over plain lists, to compare ours with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from backend.core.worker_pool import WorkerLoad


@dataclass
class NaiveWorker:
    """Attributes: sizes in tokens are whole pages of `page`; `promised` is kept for pending decodes."""

    name: int
    capacity: int
    page: int
    outstanding: int = 0
    requests: int = 0
    used: int = 0
    promised: int = 0
    draining: bool = False

    @classmethod
    def of(cls, load: WorkerLoad) -> NaiveWorker:
        """A copy of an account; draining is what is in no pool."""
        page = load.page_size
        return cls(
            load.worker_id, load.num_pages * page, page, load.outstanding_prefill_tokens, load.num_requests,
            load.used_pages * page, load.promised_pages * page, load.pool is None,
        )  # fmt: skip

    def whole_pages(self, tokens: int) -> int:
        return ceil(tokens / self.page) * self.page

    def can_ever_hold(self, tokens: int) -> bool:
        return not self.draining and self.whole_pages(tokens) <= self.capacity

    def holds_after_promises(self, tokens: int) -> bool:
        return self.can_ever_hold(tokens) and self.used + self.promised + self.whole_pages(tokens) <= self.capacity


def least_loaded(workers: Sequence[NaiveWorker]) -> NaiveWorker | None:
    """Ties go to the fewest requests, then to the lowest name."""
    return min(workers, key=lambda worker: (worker.outstanding, worker.requests, worker.name), default=None)


def colocated_serving(tokens: int, colocated: Sequence[NaiveWorker]) -> NaiveWorker | None:
    """Each worker has a queue of its own, so only what it can never hold is kept from it."""
    return least_loaded([worker for worker in colocated if worker.can_ever_hold(tokens)])


def algorithm_2(
    tokens: int, prefill: Sequence[NaiveWorker], colocated: Sequence[NaiveWorker], theta: float
) -> tuple[str, int] | None:
    """("prefill" or "colocated", the worker's name), or None: to the central FIFO."""
    if not any(worker.can_ever_hold(tokens) for worker in prefill):
        chosen = colocated_serving(tokens, colocated)
        return ("colocated", chosen.name) if chosen else None
    chosen = least_loaded([w for w in prefill if w.outstanding < theta and w.holds_after_promises(tokens)])
    if chosen:
        return "prefill", chosen.name
    if theta == inf:
        return None
    chosen = least_loaded([w for w in colocated if w.outstanding < theta and w.holds_after_promises(tokens)])
    return ("colocated", chosen.name) if chosen else None
