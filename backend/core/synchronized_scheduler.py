"""Batches that start and end together: what continuous batching is compared with, and nothing to serve with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backend.core.page_pool import PagePool
from backend.core.prefill_queue import PrefillQueue, allocate, register, release
from backend.core.queries import is_whole, num_query_tokens
from backend.core.request import Request, RequestStatus
from backend.core.step import StepPlan, StepResult


@dataclass(frozen=True)
class SynchronizedSchedulerConfig:
    """Attributes:
    batch_size: requests of a full batch.
    batch_timeout_s: how long the first of a batch waits for the others at most.
    """

    batch_size: int
    batch_timeout_s: float


class SynchronizedScheduler:
    """Runs a batch until the last answer in it is complete, then the next. Not thread-safe.

    A batch is whole requests: a member's next block belongs to it, and the seat of one that ended early
    stays empty. It moves in lockstep: all members prefill in one step, and none begins its next block before
    all have finished this one. A member whose cache policy recomputes everything does so beside the others'
    denoising steps. Who runs the steps must `add` the next block of a member or `abort` it.
    """

    def __init__(self, config: SynchronizedSchedulerConfig, pool: PagePool, logits_shift: int = 0) -> None:
        if config.batch_size < 1:
            raise ValueError(f"batch_size={config.batch_size} must be at least 1")
        self.config = config
        self.logits_shift = logits_shift
        self.pool = pool
        self._waiting = PrefillQueue()
        self._next_blocks = PrefillQueue()
        self._members: set[str] = set()
        self._denoising: dict[str, Request] = {}
        self._requests: dict[str, Request] = {}
        self._unseen: set[str] = set()
        self._seen_at: dict[str, float] = {}
        """Since when each waiting request waits, by the first `schedule` that found it."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._next_blocks)

    @property
    def waiting_tokens(self) -> int:
        return self._waiting.num_tokens + self._next_blocks.num_tokens

    @property
    def can_run_ahead(self) -> bool:
        """Each step depends on the one before."""
        return False

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queues a new request, or the next block of one in the batch. Raises: see `register`."""
        register(self._requests, self.pool, request)
        if request.request_id in self._members:
            self._next_blocks.add(request)
        else:
            self._waiting.add(request)
            self._unseen.add(request.request_id)

    def abort(self, request_id: str) -> Request | None:
        """Forgets a request between two steps, its place in the batch too; None if no block of it is here."""
        request = self._requests.get(request_id)
        self._members.discard(request_id)
        if request is not None:
            self._drop(request)
            request.transition(RequestStatus.FINISHED_ABORTED)
        return request

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """The next step; None when there is nothing to run yet.

        Args:
            now: seconds on any clock that only goes forward.
        """
        for name in self._unseen:
            self._seen_at[name] = now
        self._unseen.clear()
        if self._denoising:
            decodes = [request for request in self._denoising.values() if request.status is RequestStatus.DENOISING]
            refreshes = [request for request in self._denoising.values() if request.status is RequestStatus.WAITING]
            for request in refreshes:
                request.transition(RequestStatus.PREFILLING)
            tokens = sum(num_query_tokens(request, self.logits_shift) for request in decodes)
            return StepPlan(refreshes, decodes, tokens)
        if self._members:
            is_complete = len(self._next_blocks) == len(self._members)
            prefills = self._next_blocks.take(len(self._next_blocks)) if is_complete else []
        else:
            prefills = self._waiting.take(self._batch(now))
            for request in prefills:
                self._members.add(request.request_id)
                del self._seen_at[request.request_id]
        for request in prefills:
            if not allocate(self.pool, request):
                raise AssertionError("a batch takes no more requests than have pages")
        return StepPlan(prefills, ()) if prefills else None

    def _batch(self, now: float) -> int:
        """How many of the waiting requests make a batch now."""
        count, room = 0, self.pool.num_pages
        while count < min(len(self._waiting), self.config.batch_size):
            room -= self.pool.pages_for(self._waiting[count].sequence_length)
            if room < 0:
                return count
            count += 1
        if count == self.config.batch_size:
            return count
        oldest = min(self._seen_at.values(), default=now)
        return count if now - oldest >= self.config.batch_timeout_s else 0

    def update(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Applies what a step committed; returns the requests that leave: ended, failed or block done."""
        left: list[Request] = []
        ran: Sequence[Request] = (*plan.prefills, *plan.decodes)
        for request, commits in zip(ran, result.commits, strict=True):
            name = request.request_id
            if request.apply(commits, result.errors.get(name), result.logprobs.get(name, ())):
                self._drop(request)
                if request.status.is_finished:
                    self._members.discard(name)
                left.append(request)
                continue
            request.revise()
            if is_whole(request, self.logits_shift):
                request.transition(RequestStatus.WAITING)
            elif request.status is RequestStatus.PREFILLING:
                request.transition(RequestStatus.DENOISING)
            self._denoising[name] = request
        return left

    def _drop(self, request: Request) -> None:
        name = request.request_id
        del self._requests[name]
        self._denoising.pop(name, None)
        self._unseen.discard(name)
        self._seen_at.pop(name, None)
        if request.status is RequestStatus.WAITING:
            self._waiting.discard(request)
            self._next_blocks.discard(request)
        release(self.pool, request)
