"""Places every block on a worker, follows it, and places it again when the worker is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from backend.core.cache_policy import cache_policy
from backend.core.ledger import Dispatch, Ledger
from backend.core.request import Request, RequestStatus
from backend.core.routing import ColocatedPolicy, WorkerId
from backend.core.sampling_params import InvalidRequestError
from components.load_bus import LoadBus
from components.protocol import BlockNews, LoadReport, ModelCard, block_dispatch
from components.runtime import Context, WorkerLostError, Workers

log = logging.getLogger(__name__)


class RequestFailedError(RuntimeError):
    """The request cannot be completed; the message says why."""


@dataclass
class _Worker:
    """What is known of one worker from its load reports."""

    report: LoadReport
    heard_at: float
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has been silent for too long; whoever waits for it stops waiting."""
    is_suspect: bool = False
    """A call to it broke; it gets no new work until it is heard again."""


class Dispatcher:
    """The router's view of the workers, its ledger and its policy. Lives in one event loop.

    Args:
        max_attempts: workers that one block may be lost with before its request fails.
        worker_timeout_s: silence after which a worker counts as lost.
        placement_timeout_s: how long a block waits while there is no worker at all.
    """

    def __init__(
        self,
        workers: Workers,
        bus: LoadBus,
        *,
        max_attempts: int,
        worker_timeout_s: float,
        placement_timeout_s: float,
    ) -> None:
        self._calls = workers
        self._bus = bus
        self._max_attempts = max_attempts
        self._worker_timeout_s = worker_timeout_s
        self._placement_timeout_s = placement_timeout_s
        self._policy = ColocatedPolicy()
        self._workers: dict[WorkerId, _Worker] = {}
        self._queue: deque[tuple[Request, asyncio.Future[WorkerId]]] = deque()
        self.ledger = Ledger()
        self.num_retries = 0

    def receive(self, report: LoadReport) -> None:
        """Takes in a load report."""
        worker = self._workers.get(report.worker_id)
        if worker is None or worker.lost.is_set():
            worker = self._workers[report.worker_id] = _Worker(report, time.monotonic())
            log.info("worker %d is here", report.worker_id)
        worker.report, worker.heard_at, worker.is_suspect = report, time.monotonic(), False

    def watch(self) -> None:
        """Declares silent workers lost; to be called a few times a second.

        While the router itself is cut off from NATS nobody is heard, and nobody is lost.
        """
        now = time.monotonic()
        listed = set(self._calls.ids())
        for worker_id, worker in list(self._workers.items()):
            silence = now - max(worker.heard_at, self._bus.connected_since)
            if self._bus.is_connected and silence > self._worker_timeout_s and not worker.lost.is_set():
                log.warning("worker %d has been silent for %.1f s: lost", worker_id, silence)
                worker.lost.set()
            if worker.lost.is_set() and worker_id not in listed:
                del self._workers[worker_id]
        self._serve_queue()

    @property
    def candidates(self) -> list[WorkerId]:
        """Workers that may get a block now: all of one model, listed, heard of, not suspect."""
        card = self.model
        listed = set(self._calls.ids())
        return [
            worker_id
            for worker_id, worker in self._workers.items()
            if worker_id in listed
            and worker.report.model == card
            and not worker.is_suspect
            and not worker.lost.is_set()
        ]

    @property
    def model(self) -> ModelCard | None:
        """The model of the worker heard of first; a worker of another model gets no work."""
        for worker in self._workers.values():
            if not worker.lost.is_set():
                return worker.report.model
        return None

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits some worker."""
        return max((self._workers[w].report.capacity_tokens for w in self.candidates), default=0)

    @property
    def num_queued(self) -> int:
        """Blocks that no worker could be found for yet."""
        return len(self._queue)

    async def run_block(self, request: Request, context: Context) -> AsyncGenerator[None]:
        """Runs the request's current block to its end; yields whenever committed tokens came in.

        Returns early, without an error, when `context` is stopped.

        Raises:
            RequestFailedError: it failed on its worker, lost too many workers, or found none.
            InvalidRequestError: no worker can take it.
        """
        lost = 0
        while True:
            worker_id = await self._place(request, context)
            if worker_id is None:
                return
            try:
                async with aclosing(self._attempt(worker_id, request, context)) as progress:
                    async for _ in progress:
                        yield
                return
            except WorkerLostError as error:
                lost += 1
                self.num_retries += 1
                worker = self._workers.get(worker_id)
                if worker is not None:
                    worker.is_suspect = True
                log.warning(
                    "%s block %d lost with worker %d (%d of %d): %s",
                    request.request_id, request.block.index, worker_id, lost, self._max_attempts, error,
                )  # fmt: skip
                if lost >= self._max_attempts:
                    raise RequestFailedError(f"gave up: {lost} workers in a row were lost with this request") from None
                request.retry_block(request.block.committed_prefix())

    async def _attempt(self, worker_id: WorkerId, request: Request, context: Context) -> AsyncGenerator[None]:
        block = request.block
        dispatch = _dispatch(request)
        # Concurrent calls must not share a context; a detached one is not stopped with its parent.
        call_context = context.detached(f"{request.request_id}/{block.index}.{block.attempt}")
        stopped = context.async_killed_or_stopped()
        link = asyncio.ensure_future(_stop_when(stopped, call_context))
        request.transition(RequestStatus.PREFILLING)
        try:
            worker = self._workers.get(worker_id)
            if worker is None:
                raise WorkerLostError("the worker left before the block got there")
            messages = self._calls.call(worker_id, block_dispatch(request), call_context, worker.lost)
            async with aclosing(messages):
                async for message in messages:
                    news = BlockNews.from_wire(message)
                    if news.error:
                        raise (InvalidRequestError if news.is_refusal else RequestFailedError)(news.error)
                    self.ledger.prefilled(dispatch)
                    if request.status is RequestStatus.PREFILLING:
                        request.transition(RequestStatus.DENOISING)
                    for token in news.tokens:
                        block.commit(block.frontier, token)
                    if news.tokens:
                        yield
                    if news.is_done:
                        return
            if not context.is_stopped():
                raise WorkerLostError("the stream ended before the block was done")
        finally:
            link.cancel()
            self.ledger.done(dispatch)
            self._serve_queue()

    async def _place(self, request: Request, context: Context) -> WorkerId | None:
        """The worker for the next attempt, charged with it; waits its turn for one.

        None if the request was stopped meanwhile.
        """
        if not self._queue and (worker_id := self._choose(request)) is not None:
            return worker_id
        turn: asyncio.Future[WorkerId] = asyncio.get_running_loop().create_future()
        entry = (request, turn)
        self._queue.append(entry)
        stopped = context.async_killed_or_stopped()
        placed = False
        try:
            waiting: set[asyncio.Future[Any]] = {turn, stopped}
            await asyncio.wait(waiting, timeout=self._placement_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                return None
            if not turn.done():
                raise RequestFailedError(f"no worker for {self._placement_timeout_s:g} s")
            placed = True
            return turn.result()
        finally:
            if not turn.done():
                self._queue.remove(entry)
            elif not placed:
                self.ledger.done(_dispatch(request))

    def _choose(self, request: Request) -> WorkerId | None:
        route = self._policy.route(self.ledger.loads(self.candidates))
        if route is None:
            return None
        tokens = cache_policy(request.params.cache_policy).prefill_tokens(request)
        self.ledger.charge(_dispatch(request), route.worker_id, tokens)
        return route.worker_id

    def _serve_queue(self) -> None:
        """Gives the waiting blocks their workers, first come first served."""
        while self._queue and (worker_id := self._choose(self._queue[0][0])) is not None:
            self._queue.popleft()[1].set_result(worker_id)


def _dispatch(request: Request) -> Dispatch:
    return request.request_id, request.block.index, request.block.attempt


async def _stop_when(stopped: asyncio.Future[bool], context: Context) -> None:
    await stopped
    context.stop_generating()
