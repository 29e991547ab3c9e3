"""A colocated worker's queues, its budget and its pages: `schedule() -> StepPlan`, `update(plan, result)`."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from backend.core.auto_budget import AutoBudget
from backend.core.budget import Budget, TokenBudget
from backend.core.page_pool import PagePool
from backend.core.prefill_queue import PrefillQueue, allocate, register
from backend.core.queries import is_steady, is_whole, num_query_tokens, num_steady_tokens
from backend.core.request import Request, RequestStatus
from backend.core.running_steps import RunningSteps
from backend.core.step import StepPlan, StepResult

LEAST_SHARE = 32
"""Of the token budget, this part is the least that a step earns for prefills."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Attributes:
    token_budget: tau of Algorithm 1, tokens per step; "auto": see `AutoBudget`.
    max_num_seqs: requests that hold pages at once.
    """

    token_budget: int | Literal["auto"]
    max_num_seqs: int


class Scheduler:
    """Batches the blocks of many requests (paper section 4.1). Not thread-safe: one thread owns it.

    A block comes to be prefilled here (status WAITING), or prefilled elsewhere, to be denoised once
    its KV has been read (WAITING_FOR_KV). The latter have the first claim on pages and seats: their
    prefill's work is done, and it holds memory on another worker (paper section 4.2).

    A step in the middle of a block that recomputes everything is a prefill to the budget, as indivisible
    as any: the request waits for it as WAITING, with its pages and its seat.

    While `can_run_ahead`, the next step may be scheduled before the last one's result is known: it
    assumes that all requests go on that do not surely end. One that ended all the same runs once more,
    to no effect, and its pages are free after that.

    Args:
        logits_shift: the model's, see `backend.core.queries`.
        is_plain: which requests can be in a step before their result of the one before is known; steady ones only.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        logits_shift: int = 0,
        is_plain: Callable[[Request], bool] = is_steady,
    ) -> None:
        self.config = config
        self.logits_shift = logits_shift
        self._is_plain = is_plain
        self._odd: set[str] = set()
        self._running = RunningSteps(pool, logits_shift)
        self.pool = pool
        self.auto_budget: AutoBudget | None = None
        self.budget: Budget
        if config.token_budget == "auto":
            self.budget = self.auto_budget = AutoBudget(config.max_num_seqs, self._num_older)
        else:
            self.budget = TokenBudget(config.token_budget, max(config.token_budget // LEAST_SHARE, 1))
        self._waiting = PrefillQueue()
        self._waiting_for_kv: list[tuple[float, int, Request]] = []
        self._transferring: dict[str, Request] = {}
        self._denoising: dict[str, Request] = {}
        self._changing: dict[str, Request] = {}
        self._requests: dict[str, Request] = {}
        self._added = 0
        self._steady_tokens: dict[str, int] = {}
        self._num_steady_tokens = 0
        self._num_seated = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_denoising(self) -> int:
        return len(self._denoising)

    @property
    def num_transferring(self) -> int:
        """Blocks whose KV is being read, or waits for pages to be read into."""
        return len(self._waiting_for_kv) + len(self._transferring)

    @property
    def has_work(self) -> bool:
        """Whether a request is here, or a step runs."""
        return bool(self._requests or self._running)

    @property
    def can_run_ahead(self) -> bool:
        """Whether `schedule` may be called before `update` has told of the step before, once.

        Not if that has a request whose next step needs the result.
        """
        return len(self._running) < 2 and not (self._odd and self._running.concern(self._odd))

    @property
    def waiting_tokens(self) -> int:
        """Prefill tokens assigned to this worker and not yet run."""
        return self._waiting.num_tokens

    def add(self, request: Request) -> None:
        """Queues one block of `request` by the request's arrival time.

        Raises:
            InvalidRequestError: it can never fit this worker's KV pool.
            ValueError: a request of this id is already here, or aborted and KV still comes in for it.
        """
        if request.request_id in self._transferring:
            raise ValueError(f"request {request.request_id} is already scheduled here")
        register(self._requests, self.pool, request)
        if not (is_steady(request) and self._is_plain(request)):
            self._odd.add(request.request_id)
        if request.status is RequestStatus.WAITING_FOR_KV:
            self._added += 1
            insort(self._waiting_for_kv, (request.arrival_time, self._added, request))
        else:
            self._waiting.add(request)

    def abort(self, request_id: str) -> Request | None:
        """Forgets a request and frees its pages; None if it is not here.

        Pages that KV is being read into stay taken until `transfer_ended`, those that a running step
        writes until its `update`.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._drop(request)
            request.transition(RequestStatus.FINISHED_ABORTED)
        return request

    def start_transfers(self) -> list[Request]:
        """The blocks that got pages now: their KV has to be read, and its end to be told."""
        started: list[Request] = []
        while self._waiting_for_kv and self._num_seated < self.config.max_num_seqs:
            request = self._waiting_for_kv[0][2]
            if not self._allocate(request):
                break
            del self._waiting_for_kv[0]
            request.transition(RequestStatus.TRANSFERRING)
            self._transferring[request.request_id] = request
            started.append(request)
        return started

    def transfer_ended(self, request_id: str, arrived: bool) -> Request | None:
        """No more bytes come for this request; with `arrived` it is denoised from the next step on.

        Otherwise it leaves: its block has to be prefilled again. None if it was aborted meanwhile.
        """
        request = self._transferring.pop(request_id)
        if request.status.is_finished:
            self._release(request)
            return None
        if arrived:
            self._next_step(request)
        else:
            self._drop(request)
        return request

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """The next step, or None when there is nothing to run.

        Args:
            now: seconds on any clock that only goes forward; only a budget that is "auto" heeds it.
        """
        if self.auto_budget:
            self.auto_budget.at(now)
        decodes = list(self._denoising.values())
        decode_tokens = self._num_steady_tokens
        decode_tokens += sum(num_query_tokens(request, self.logits_shift) for request in self._changing.values())
        if self._running:
            for request in self._running.last.prefills:
                if self._requests.get(request.request_id) is request and request.status is RequestStatus.PREFILLING:
                    self._denoise(request)
            decodes = [request for request in self._denoising.values() if not self._running.surely_ends(request)]
            decode_tokens = sum(map(self._num_tokens, decodes))
        admitted = self.budget.admit(decode_tokens, self._waiting.sizes, self._seat)
        prefills = self._waiting.take(admitted)
        if not prefills and not decodes:
            return None
        plan = StepPlan(prefills, decodes, decode_tokens)
        self._running.begin(plan)
        return plan

    def _num_tokens(self, request: Request) -> int:
        return self._steady_tokens.get(request.request_id) or num_query_tokens(request, self.logits_shift)

    def _num_older(self, index: int) -> int:
        waiting = self._waiting[index]
        if waiting.pages:
            return 0  # others may wait for its pages
        return sum(request.arrival_time < waiting.arrival_time for request in self._denoising.values())

    def _seat(self, index: int) -> bool:
        request = self._waiting[index]
        if request.pages:
            return True
        if self._waiting_for_kv or self._num_seated >= self.config.max_num_seqs:
            return False  # what comes free belongs to those whose KV waits
        return self._allocate(request)

    def _allocate(self, request: Request) -> bool:
        has_pages = allocate(self.pool, request)
        self._num_seated += has_pages
        return has_pages

    def _release(self, request: Request) -> None:
        self._num_seated -= bool(request.pages)
        self._running.release(request)

    def update(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Applies what a step committed; returns the requests that leave: ended, failed or block done.

        A request whose block is done and whose answer is not complete leaves with the status it had;
        `next_block()` is for whoever places it again. Its pages are free. What the step did not concern any
        more, as it had left or was aborted before, is taken out of `plan`.
        """
        if self.auto_budget:
            self.auto_budget.ran(len(plan.prefills), len(plan.decodes))
        left: list[Request] = []
        gone: set[int] = set()
        for i, (request, commits) in enumerate(zip(self._running.end(plan), result.commits, strict=True)):
            if request is None or self._requests.get(request.request_id) is not request:
                gone.add(i)
                continue
            name = request.request_id
            if not request.apply(commits, result.errors.get(name), result.logprobs.get(name, ())):
                if request.status is RequestStatus.PREFILLING or name in self._changing:
                    self._next_step(request)
                continue
            self._drop(request)
            left.append(request)
        if gone:
            first = len(plan.prefills)
            plan.prefills = [request for i, request in enumerate(plan.prefills) if i not in gone]
            plan.decodes = [request for i, request in enumerate(plan.decodes, first) if i not in gone]
        return left

    def _next_step(self, request: Request) -> None:
        name = request.request_id
        request.revise()
        if is_whole(request, self.logits_shift):
            self._denoising.pop(name, None)
            self._changing.pop(name, None)
            request.transition(RequestStatus.WAITING)
            self._waiting.add(request)
        elif name not in self._denoising:
            self._denoise(request)

    def _denoise(self, request: Request) -> None:
        name = request.request_id
        request.transition(RequestStatus.DENOISING)
        self._denoising[name] = request
        if is_steady(request):
            self._steady_tokens[name] = num_steady_tokens(request)
            self._num_steady_tokens += self._steady_tokens[name]
        else:
            self._changing[name] = request

    def _drop(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._odd.discard(request.request_id)
        if not self._requests:
            self.budget.idle()
        self._denoising.pop(request.request_id, None)
        self._changing.pop(request.request_id, None)
        self._num_steady_tokens -= self._steady_tokens.pop(request.request_id, 0)
        if request.status is RequestStatus.WAITING:
            self._waiting.discard(request)
        elif request.status is RequestStatus.WAITING_FOR_KV:
            self._waiting_for_kv = [entry for entry in self._waiting_for_kv if entry[2] is not request]
        if request.request_id not in self._transferring:
            self._release(request)
