"""A prefill worker's queue and pages: whole prefills, whose KV is kept until a colocated worker has read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backend.core.page_pool import PagePool
from backend.core.prefill_queue import PrefillQueue, allocate, register, release
from backend.core.request import Request, RequestStatus
from backend.core.step import StepPlan, StepResult


@dataclass(frozen=True)
class PrefillSchedulerConfig:
    """Attributes:
    max_prefill_tokens: tokens of one step; a larger prefill runs alone.
    """

    max_prefill_tokens: int


class PrefillScheduler:
    """Head of line, the first always taken (paper section 4.2). Not thread-safe: one thread owns it."""

    def __init__(self, config: PrefillSchedulerConfig, pool: PagePool) -> None:
        self.config = config
        self.pool = pool
        self._waiting = PrefillQueue()
        self._requests: dict[str, Request] = {}
        self._num_held = 0
        self.before_free: Callable[[Request], None] = lambda request: None
        """Called with a request whose pages are about to be free: others may be reading them."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_held(self) -> int:
        """Prefilled blocks whose KV waits to be read."""
        return self._num_held

    @property
    def can_run_ahead(self) -> bool:
        """Each step depends on the one before."""
        return False

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def waiting_tokens(self) -> int:
        return self._waiting.num_tokens

    def add(self, request: Request) -> None:
        """Queues one block of `request` for its prefill, by the request's arrival time. Raises: see `register`."""
        register(self._requests, self.pool, request)
        self._waiting.add(request)

    def abort(self, request_id: str) -> Request | None:
        """Forgets a request between two steps and frees its pages; None if it is not here."""
        request = self._requests.get(request_id)
        if request is not None:
            self._drop(request)
            request.transition(RequestStatus.FINISHED_ABORTED)
        return request

    def release(self, request_id: str) -> Request | None:
        """Frees the pages of a block that has been read; None if it is not held here."""
        request = self._requests.get(request_id)
        if request is None or request.status is not RequestStatus.WAITING_FOR_KV:
            return None
        self._drop(request)
        return request

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """The next step, or None when no prefill waits or none finds pages; the time makes no difference."""
        admitted = tokens = 0
        for size in self._waiting.sizes:
            tokens += size
            if admitted and tokens > self.config.max_prefill_tokens:
                break
            if not allocate(self.pool, self._waiting[admitted]):
                break
            admitted += 1
        prefills = self._waiting.take(admitted)
        return StepPlan(prefills, ()) if prefills else None

    def update(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Applies what a step committed; returns the requests that leave: ended, failed or block done.

        The others wait for their KV to be read, with status WAITING_FOR_KV.
        """
        left: list[Request] = []
        ran: Sequence[Request] = plan.prefills
        for request, commits in zip(ran, result.commits, strict=True):
            name = request.request_id
            if request.apply(commits, result.errors.get(name), result.logprobs.get(name, ())):
                self._drop(request)
                left.append(request)
            else:
                request.transition(RequestStatus.WAITING_FOR_KV)
                self._num_held += 1
        return left

    def _drop(self, request: Request) -> None:
        del self._requests[request.request_id]
        if request.status is RequestStatus.WAITING:
            self._waiting.discard(request)
        elif request.status is RequestStatus.WAITING_FOR_KV:
            self._num_held -= 1
        if request.pages:
            self.before_free(request)
        release(self.pool, request)
