"""One worker's queues, its budget and its pages: `schedule() -> StepPlan`, `update(plan, result)`."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from backend.core.budget import TokenBudget
from backend.core.cache_policy import cache_policy
from backend.core.page_pool import PagePool
from backend.core.request import Request, RequestStatus
from backend.core.sampling_params import InvalidRequestError
from backend.core.step import StepPlan, StepResult


@dataclass(frozen=True)
class SchedulerConfig:
    """Attributes:
    token_budget: tau of Algorithm 1, tokens per step.
    max_num_seqs: requests that hold pages at once.
    """

    token_budget: int
    max_num_seqs: int


class Scheduler:
    """Batches the blocks of many requests (paper section 4.1). Not thread-safe: one thread owns it."""

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        self.config = config
        self.pool = pool
        self.budget = TokenBudget(config.token_budget)
        self._waiting: list[tuple[float, int, Request]] = []
        self._denoising: dict[str, Request] = {}
        self._requests: dict[str, Request] = {}
        self._added = 0
        self._decode_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_denoising(self) -> int:
        return len(self._denoising)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def waiting_tokens(self) -> int:
        """Prefill tokens assigned to this worker and not yet run."""
        return sum(cache_policy(r.params.cache_policy).prefill_tokens(r) for _, _, r in self._waiting)

    def add(self, request: Request) -> None:
        """Queues one block of `request` for its prefill, by the request's arrival time.

        Raises:
            InvalidRequestError: it can never fit this worker's KV pool.
            ValueError: a request of this id is already here.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id} is already scheduled here")
        needed, capacity = self.pool.pages_for(request.sequence_length), self.pool.num_pages
        if needed > capacity:
            raise InvalidRequestError(
                f"prompt ({len(request.prompt)}) + canvas ({request.params.canvas_length}) = "
                f"{request.sequence_length} tokens do not fit the KV cache of {capacity * self.pool.page_size} tokens"
            )
        self._requests[request.request_id] = request
        self._added += 1
        insort(self._waiting, (request.arrival_time, self._added, request))

    def abort(self, request_id: str) -> Request | None:
        """Forgets a request between two steps and frees its pages; None if it is not here."""
        request = self._requests.get(request_id)
        if request is not None:
            self._drop(request)
            request.transition(RequestStatus.FINISHED_ABORTED)
        return request

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to run."""
        decodes = list(self._denoising.values())
        prefills: list[Request] = []
        if self._waiting:
            sizes = [cache_policy(r.params.cache_policy).prefill_tokens(r) for _, _, r in self._waiting]
            admitted = self.budget.admit(self._decode_tokens, sizes, lambda i: self._seat(i, len(decodes)))
            prefills = [request for _, _, request in self._waiting[:admitted]]
            del self._waiting[:admitted]
            for request in prefills:
                request.transition(RequestStatus.PREFILLING)
        else:
            self.budget.admit(self._decode_tokens, (), lambda i: False)
        return StepPlan(prefills, decodes) if prefills or decodes else None

    def _seat(self, index: int, num_decodes: int) -> bool:
        request = self._waiting[index][2]
        if num_decodes + index >= self.config.max_num_seqs:
            return False
        pages = self.pool.allocate(request.request_id, self.pool.pages_for(request.sequence_length))
        if pages is None:
            return False
        request.pages = pages
        return True

    def update(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Applies what a step committed; returns the requests that leave: ended, failed or block done.

        A request whose block is done and whose answer is not complete leaves with the status it had;
        `next_block()` is for whoever places it again. Its pages are free.
        """
        left: list[Request] = []
        ran: Sequence[Request] = (*plan.prefills, *plan.decodes)
        for request, commits in zip(ran, result.commits, strict=True):
            if request.request_id in result.errors:
                request.transition(RequestStatus.FINISHED_ERROR)
            else:
                moved = request.commit(commits)
                end = request.answer(len(request.response))[1] if moved else None
                if end is not None:
                    request.transition(end)
                elif request.block.num_masked and request.status is RequestStatus.PREFILLING:
                    request.transition(RequestStatus.DENOISING)
                    self._denoising[request.request_id] = request
                    self._decode_tokens += cache_policy(request.params.cache_policy).denoising_tokens(request)
            if request.status.is_finished or not request.block.num_masked:
                self._drop(request)
                left.append(request)
        return left

    def _drop(self, request: Request) -> None:
        del self._requests[request.request_id]
        if not self._requests:
            self.budget.idle()
        if self._denoising.pop(request.request_id, None) is not None:
            self._decode_tokens -= cache_policy(request.params.cache_policy).denoising_tokens(request)
        if request.status is RequestStatus.WAITING:
            self._waiting = [entry for entry in self._waiting if entry[2] is not request]
        if request.pages:
            self.pool.release(request.request_id)
            request.pages = []
