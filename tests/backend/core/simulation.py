"""A small graph without a model: the real Placer and the real schedulers, made-up time, commits and kills.

Everything that happens is a call at a time; what a process hears of another, it hears a little later.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Literal

from backend.core.ledger import Dispatch
from backend.core.page_pool import PagePool
from backend.core.placer import Placer
from backend.core.prefill_scheduler import PrefillScheduler, PrefillSchedulerConfig
from backend.core.request import Request, RequestStatus
from backend.core.routing import Policy, Prefill, Route, RouteKind
from backend.core.scheduler import Scheduler, SchedulerConfig
from backend.core.step import StepPlan, StepResult
from backend.core.worker_pool import WorkerLoad
from tests.backend.core.fake_steps import BLOCK, EOS, make

LATENCY_S = 0.001
TRANSFER_S = 0.004
PAGE_SIZE = 4


class Worker:
    """One process: it does one step after the other, and what it was asked meanwhile between two steps."""

    def __init__(self, graph: Graph, worker_id: int, is_prefill: bool, num_pages: int) -> None:
        self.graph = graph
        self.is_prefill = is_prefill
        self.load = WorkerLoad(worker_id, num_pages, PAGE_SIZE)
        self.pool = PagePool(num_pages, PAGE_SIZE)
        self.prefilling = PrefillScheduler(PrefillSchedulerConfig(60), self.pool)
        self.denoising = Scheduler(SchedulerConfig(graph.token_budget, 8), self.pool)
        self.is_alive = True
        self._is_busy = False
        self._asked: list[Callable[[], object]] = []

    @property
    def scheduler(self) -> Scheduler | PrefillScheduler:
        return self.prefilling if self.is_prefill else self.denoising

    def ask(self, what: Callable[[], object]) -> None:
        self._asked.append(what)
        self._go_on()

    def _go_on(self) -> None:
        if self._is_busy or not self.is_alive:
            return
        while self._asked:
            self._asked.pop(0)()
        for request in self.denoising.start_transfers():
            self.graph.at(TRANSFER_S, self.graph.transfer_ended, self, request)
        plan = self.scheduler.schedule(self.graph.now)
        self.pool.check()
        if plan is not None:
            self._is_busy = True
            tokens = sum(r.sequence_length for r in plan.prefills) + BLOCK * len(plan.decodes)
            self.graph.at(0.001 + tokens * 1e-4, self._step_ended, plan)

    def _step_ended(self, plan: StepPlan) -> None:
        self._is_busy = False
        if not self.is_alive:
            return
        ran = (*plan.prefills, *plan.decodes)
        left = self.scheduler.update(plan, StepResult([self.graph.forward(request) for request in ran]))
        self.pool.check()
        for request in plan.prefills:
            self.graph.at(LATENCY_S, self.graph.prefilled, self, request)
        for request in left:
            self.graph.at(LATENCY_S, self.graph.block_ended, request)
        self._go_on()


@dataclass
class Answer:
    """What the router knows of one request."""

    name: str
    num_tokens: int
    prompt: int
    canvas: int
    arrival: float
    tokens: list[int] = field(default_factory=list)
    num_attempts: int = 0
    status: RequestStatus | None = None

    def expected(self, position: int) -> int:
        """The token at this position whoever computes it: the answer ends after `num_tokens`."""
        return EOS if position == self.num_tokens else 10 + (position * 7 + self.prompt) % 50


@dataclass
class Flight:
    """One dispatch: who has to do with it, and what its prefill committed elsewhere."""

    answer: Answer
    workers: list[Worker] = field(default_factory=list)
    commits: list[tuple[int, int]] = field(default_factory=list)


class Graph:
    """A router and its workers."""

    def __init__(self, policy: Policy, seed: int, token_budget: int | Literal["auto"] = 24) -> None:
        self.token_budget = token_budget
        self.random = Random(seed)
        self.now = 0.0
        self.placer = Placer(policy, lambda dispatch, route: self.at(LATENCY_S, self._assigned, dispatch, route))
        self.workers: dict[int, Worker] = {}
        self.all_workers: list[Worker] = []
        self.answers: dict[str, Answer] = {}
        self.flights: dict[Dispatch, Flight] = {}
        self.kinds: list[RouteKind] = []
        self._events: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._numbers = count()

    def at(self, delay_s: float, what: Callable[..., object], *args: object) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), what, args))

    def run(self) -> None:
        while self._events:
            self.now, _, what, args = heapq.heappop(self._events)
            what(*args)

    def forward(self, request: Request) -> list[tuple[int, int]]:
        """Commits one to three of the masked positions."""
        answer = self.answers[_dispatch_of(request)[0]]
        masked = [i for i, token in enumerate(request.block.tokens) if token is None]
        chosen = self.random.sample(masked, min(len(masked), self.random.randint(1, 3)))
        return [(i, answer.expected(len(request.response) + i)) for i in chosen]

    # Workers.

    def join(self, worker_id: int, is_prefill: bool, num_pages: int) -> None:
        worker = Worker(self, worker_id, is_prefill, num_pages)
        self.workers[worker_id] = worker
        self.all_workers.append(worker)
        self.placer.show(worker.load, self.placer.prefill_pool if is_prefill else self.placer.colocated_pool)

    def kill(self, worker_id: int) -> None:
        """The router hears of it by the streams that break, and a while later by the silence."""
        worker = self.workers[worker_id]
        worker.is_alive = False
        for dispatch, flight in list(self.flights.items()):
            if worker in flight.workers:
                self.at(self.random.random() * 0.01, self.lost, dispatch)
        self.at(0.005, self.placer.hide, worker.load)
        self.at(0.03, self.join, worker_id, worker.is_prefill, worker.load.num_pages)

    # The router.

    def arrive(self, answer: Answer) -> None:
        self.answers[answer.name] = answer
        answer.num_attempts += 1
        dispatch = (answer.name, len(answer.tokens) // BLOCK, answer.num_attempts)
        self.flights[dispatch] = Flight(answer)
        self.placer.submit(dispatch, Prefill(answer.prompt + answer.canvas, answer.prompt, answer.arrival))

    def withdraw(self, answer: Answer) -> None:
        for dispatch, flight in list(self.flights.items()):
            if flight.answer is answer:
                answer.status = RequestStatus.FINISHED_ABORTED
                self._forget(dispatch)

    def lost(self, dispatch: Dispatch) -> None:
        """A worker that this dispatch needs is gone: its block is placed again."""
        flight = self.flights.get(dispatch)
        if flight is not None:
            self._forget(dispatch)
            self.arrive(flight.answer)

    def _forget(self, dispatch: Dispatch) -> None:
        flight = self.flights.pop(dispatch)
        self.placer.done(dispatch)
        for worker in flight.workers:
            worker.ask(partial(worker.scheduler.abort, _name(dispatch)))

    def _assigned(self, dispatch: Dispatch, route: Route) -> None:
        flight = self.flights.get(dispatch)
        if flight is None:
            return
        worker = self.workers[route.load.worker_id]
        flight.workers.append(worker)
        self.kinds.append(route.kind)
        if not all(involved.is_alive for involved in flight.workers) or worker.load is not route.load:
            self.at(LATENCY_S, self.lost, dispatch)
            return
        answer = flight.answer
        request = make(
            _name(dispatch), answer.prompt, answer.canvas, answer.arrival,
            finished_blocks=answer.tokens, attempt=dispatch[2],
            prefilled=flight.commits if route.kind is RouteKind.DECODE else None,
        )  # fmt: skip
        worker.ask(lambda: worker.scheduler.add(request))

    def prefilled(self, worker: Worker, request: Request) -> None:
        dispatch = _dispatch_of(request)
        if dispatch in self.flights:
            self.placer.prefilled(dispatch)
            if worker.is_prefill and request.status is RequestStatus.WAITING_FOR_KV:
                flight = self.flights[dispatch]
                flight.commits = [(i, token) for i, token in enumerate(request.block.tokens) if token is not None]
                self.placer.hand_over(dispatch)

    def transfer_ended(self, target: Worker, request: Request) -> None:
        dispatch = _dispatch_of(request)
        flight = self.flights.get(dispatch)
        source = flight.workers[0] if flight is not None else None
        arrived = source is not None and source.is_alive
        target.ask(lambda: target.denoising.transfer_ended(request.request_id, arrived))
        if arrived and source is not None:
            source.ask(lambda: source.prefilling.release(request.request_id))
            self.placer.source_freed(dispatch)

    def block_ended(self, request: Request) -> None:
        dispatch = _dispatch_of(request)
        flight = self.flights.pop(dispatch, None)
        if flight is None:
            return
        self.placer.done(dispatch)
        answer = flight.answer
        answer.tokens += request.block.committed_prefix()
        if request.status.is_finished:
            answer.status = request.status
            answer.tokens = request.answer()[0]
        else:
            self.arrive(answer)


def _name(dispatch: Dispatch) -> str:
    return "{}/{}.{}".format(*dispatch)


def _dispatch_of(request: Request) -> Dispatch:
    return request.request_id.split("/")[0], request.block.index, request.block.attempt
