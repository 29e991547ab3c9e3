"""Follows every block to its end: placed, prefilled, handed over, denoised, and placed again when a worker is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from backend.core.cache_policy import cache_policy
from backend.core.ledger import Dispatch
from backend.core.placer import Placer
from backend.core.request import Request, RequestStatus
from backend.core.routing import Policy, Prefill, Route, RouteKind
from backend.core.sampling_params import InvalidRequestError
from backend.core.step import PHASES
from components.fleet import Fleet, FleetWorker
from components.load_bus import LoadBus
from components.protocol import BlockNews, HeldKV, block_dispatch
from components.runtime import Context, WorkerLostError, Workers

log = logging.getLogger(__name__)


class RequestFailedError(RuntimeError):
    """The request cannot be completed; the message says why."""


class BlockLostError(RuntimeError):
    """This attempt at the block came to nothing, another one may succeed."""

    def __init__(self, message: str, *, is_transfer: bool = False) -> None:
        super().__init__(message)
        self.is_transfer = is_transfer


@dataclass
class Trip:
    """What is remembered of a request over its blocks.

    Attributes:
        seconds: time spent per phase so far, summed over blocks and attempts.
        route: how its first block was routed.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    route: RouteKind | None = None


class Dispatcher:
    """Runs blocks on the workers that the placer chooses. Lives in one event loop.

    Args:
        calls: see `Fleet`.
        max_attempts: times that one block may be lost before its request fails.
        worker_timeout_s: silence after which a worker counts as lost.
        placement_timeout_s: how long a block waits while no worker could ever take it.
    """

    def __init__(
        self,
        policy: Policy,
        calls: Mapping[str, Workers],
        bus: LoadBus,
        *,
        max_attempts: int,
        worker_timeout_s: float,
        placement_timeout_s: float,
    ) -> None:
        self._max_attempts = max_attempts
        self._placement_timeout_s = placement_timeout_s
        self.placer = Placer(policy, self._assigned)
        self.fleet = Fleet(self.placer, calls, bus, worker_timeout_s)
        self._turns: dict[Dispatch, asyncio.Future[Route]] = {}
        self._stranded_since: dict[Dispatch, float] = {}
        self.num_retries = 0
        self.num_prefills: Counter[tuple[str, str]] = Counter()
        """Prefills placed, by (arrival, refresh or retry; prefill or colocated)."""

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that some worker can denoise; 0 while there is none."""
        return self.placer.colocated_pool.capacity_tokens

    def watch(self) -> None:
        """Fails what has waited too long for a worker to show up; to be called a few times a second."""
        self.fleet.watch()
        now = time.monotonic()
        stranded = [dispatch for dispatch in self._turns if self.placer.is_stranded(dispatch)]
        self._stranded_since = {d: self._stranded_since.get(d, now) for d in stranded}
        for dispatch, since in self._stranded_since.items():
            if now - since > self._placement_timeout_s:
                reason = f"no worker that can take it for {self._placement_timeout_s:g} s"
                self._turns.pop(dispatch).set_exception(RequestFailedError(reason))

    async def run_block(self, request: Request, context: Context, trip: Trip) -> AsyncGenerator[None]:
        """Runs the request's current block to its end; yields whenever committed tokens came in.

        Returns early, without an error, when `context` is stopped.

        Raises:
            RequestFailedError: it failed on its worker, was lost too often, or found no worker.
            InvalidRequestError: no worker can take it.
        """
        num_lost = 0
        is_local_only = False
        while True:
            try:
                async with aclosing(self._attempt(request, context, trip, num_lost, is_local_only)) as progress:
                    async for _ in progress:
                        yield
                return
            except BlockLostError as error:
                num_lost += 1
                self.num_retries += 1
                is_local_only |= error.is_transfer
                log.warning(
                    "%s block %d lost (%d of %d): %s",
                    request.request_id, request.block.index, num_lost, self._max_attempts, error,
                )  # fmt: skip
                if num_lost >= self._max_attempts:
                    raise RequestFailedError(f"gave up: its block was lost {num_lost} times in a row") from None
                request.retry_block(request.block.committed_prefix())

    async def _attempt(
        self, request: Request, context: Context, trip: Trip, num_lost: int, is_local_only: bool
    ) -> AsyncGenerator[None]:
        dispatch = (request.request_id, request.block.index, request.block.attempt)
        prefill = Prefill(
            cache_policy(request.params.cache_policy).prefill_tokens(request),
            len(request.prompt),
            request.arrival_time,
            trip.route,
            is_local_only,
        )
        try:
            with _timed(trip, "prefill_queue"):
                route = await self._turn(dispatch, context, lambda: self.placer.submit(dispatch, prefill))
            if route is None:
                return
            trip.route = trip.route or route.kind
            cause = "retry" if num_lost else "refresh" if request.block.index else "arrival"
            self.num_prefills[cause, route.kind.name.lower()] += 1
            request.transition(RequestStatus.PREFILLING)
            run = self._prefilled_elsewhere if route.kind is RouteKind.PREFILL else self._colocated
            async with aclosing(run(route, dispatch, request, context, trip)) as progress:
                async for _ in progress:
                    yield
        finally:
            self.placer.done(dispatch)

    async def _colocated(
        self, route: Route, dispatch: Dispatch, request: Request, context: Context, trip: Trip
    ) -> AsyncGenerator[None]:
        async with self._call(route, request, context, "colocated") as news_of:
            async for news in news_of:
                self.placer.prefilled(dispatch)
                if request.status is RequestStatus.PREFILLING:
                    request.transition(RequestStatus.DENOISING)
                if _take(news, request, trip):
                    yield
                if news.is_done:
                    return

    async def _prefilled_elsewhere(
        self, route: Route, dispatch: Dispatch, request: Request, context: Context, trip: Trip
    ) -> AsyncGenerator[None]:
        """Prefill on one worker, then the rest of the block on another that reads the KV.

        The prefill worker's call stays open until its pages are free: it is how that worker knows
        that somebody still wants them, and how its death is noticed before the KV is read.
        """
        async with self._call(route, request, context, "prefill") as news_of:
            held = None
            async for news in news_of:
                self.placer.prefilled(dispatch)
                if _take(news, request, trip):
                    yield
                if news.is_done:
                    return
                if news.held is not None:
                    held = news.held
                    break
            if held is None:
                return
            request.transition(RequestStatus.WAITING_FOR_KV)
            source = asyncio.ensure_future(self._follow_source(news_of, dispatch))
            try:
                async with aclosing(self._denoised(held, source, dispatch, request, context, trip)) as progress:
                    async for _ in progress:
                        yield
            finally:
                # Before its generator is closed it has to stop running.
                source.cancel()
                await asyncio.wait({source})

    async def _denoised(
        self,
        held: HeldKV,
        source: asyncio.Future[None],
        dispatch: Dispatch,
        request: Request,
        context: Context,
        trip: Trip,
    ) -> AsyncGenerator[None]:
        with _timed(trip, "decode_queue"):
            route = await self._turn(dispatch, context, lambda: self.placer.hand_over(dispatch), source)
        if route is None:
            return
        request.transition(RequestStatus.TRANSFERRING)
        async with self._call(route, request, context, "decode", held, source) as news_of:
            async for news in news_of:
                if request.status is RequestStatus.TRANSFERRING and not news.error:
                    request.transition(RequestStatus.DENOISING)
                if _take(news, request, trip):
                    yield
                if news.is_done:
                    return

    async def _follow_source(self, news_of: AsyncIterator[BlockNews], dispatch: Dispatch) -> None:
        """Until the prefill worker has freed the pages; BlockLostError if it is lost or gives up before."""
        async for news in news_of:
            if news.is_done:
                if news.error:
                    raise BlockLostError(news.error)
                self.placer.source_freed(dispatch)

    @asynccontextmanager
    async def _call(
        self,
        route: Route,
        request: Request,
        context: Context,
        what: str,
        held: HeldKV | None = None,
        source: asyncio.Future[None] | None = None,
    ) -> AsyncIterator[AsyncIterator[BlockNews]]:
        """A call of a worker for the request's current block; leaving it ends the call.

        Args:
            source: fails when the KV that the worker has to read first is gone.
        """
        worker = self.fleet.of(route.load)
        if worker is None:
            raise BlockLostError("the worker left before the block got there")
        # Concurrent calls must not share a context; a detached one is not stopped with its parent.
        name = f"{request.request_id}/{request.block.index}.{request.block.attempt}/{what}"
        call_context = context.detached(name)
        link = asyncio.ensure_future(_stop_when(context.async_killed_or_stopped(), call_context))
        lost = asyncio.Event()
        losing = asyncio.ensure_future(_set_when(lost, worker, source, request))
        messages = self.fleet.calls(worker).call(worker.worker_id, block_dispatch(request, held), call_context, lost)
        try:
            async with aclosing(messages), aclosing(self._read(messages, worker, source, context)) as news_of:
                yield news_of
        finally:
            link.cancel()
            losing.cancel()

    async def _read(
        self,
        messages: AsyncIterator[Any],
        worker: FleetWorker,
        source: asyncio.Future[None] | None,
        context: Context,
    ) -> AsyncGenerator[BlockNews]:
        """A worker's news, up to the last; ends early, without an error, when `context` is stopped."""
        try:
            async for message in messages:
                news = BlockNews.from_wire(message)
                yield news
                if news.is_done:
                    return
            if not context.is_stopped():
                raise WorkerLostError("the stream ended before the block was done")
        except WorkerLostError as error:
            if source is not None and _failure(source) and not worker.lost.is_set():
                raise BlockLostError(str(_failure(source))) from None
            self.fleet.suspect(worker)
            raise BlockLostError(f"{worker.report.component} {worker.worker_id}: {error}") from None

    async def _turn(
        self,
        dispatch: Dispatch,
        context: Context,
        begin: Callable[[], None],
        source: asyncio.Future[None] | None = None,
    ) -> Route | None:
        """Begins to wait for a worker; where to go, or None if the request was stopped meanwhile.

        Raises:
            BlockLostError: `source` failed first.
            RequestFailedError: no worker came that could ever take it.
        """
        turn: asyncio.Future[Route] = asyncio.get_running_loop().create_future()
        self._turns[dispatch] = turn
        try:
            begin()
            if not turn.done():
                waiting: set[asyncio.Future[Any]] = {turn, context.async_killed_or_stopped()}
                if source is not None:
                    waiting.add(source)
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if context.is_stopped():
                return None
            if turn.done():
                return turn.result()
            raise BlockLostError(str(_failure(source) or "the KV is gone before anybody read it"))
        finally:
            self._turns.pop(dispatch, None)
            turn.cancel()

    def _assigned(self, dispatch: Dispatch, route: Route) -> None:
        turn = self._turns.pop(dispatch, None)
        if turn is not None and not turn.done():
            turn.set_result(route)


def _take(news: BlockNews, request: Request, trip: Trip) -> bool:
    """Commits what a worker says; True if there were tokens."""
    if news.error:
        if news.is_retryable:
            raise BlockLostError(news.error, is_transfer=request.status is RequestStatus.TRANSFERRING)
        raise (InvalidRequestError if news.is_refusal else RequestFailedError)(news.error)
    for token in news.tokens:
        request.block.commit(request.block.frontier, token)
    for phase, seconds in zip(PHASES, news.seconds, strict=True):
        trip.seconds[phase] += seconds
    return bool(news.tokens)


def _failure(source: asyncio.Future[None] | None) -> BaseException | None:
    return source.exception() if source is not None and source.done() and not source.cancelled() else None


@contextmanager
def _timed(trip: Trip, phase: str) -> Iterator[None]:
    """Adds the time spent inside to one phase of a trip."""
    started = time.monotonic()
    try:
        yield
    finally:
        trip.seconds[phase] += time.monotonic() - started


async def _stop_when(stopped: asyncio.Future[bool], context: Context) -> None:
    await stopped
    context.stop_generating()


async def _set_when(
    lost: asyncio.Event, worker: FleetWorker, source: asyncio.Future[None] | None, request: Request
) -> None:
    """Sets `lost` when the worker is, or when what it has to read is gone before it has read it."""
    gone = asyncio.ensure_future(worker.lost.wait())
    waiting: set[asyncio.Future[Any]] = {gone, *([source] if source else [])}
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if gone in done or (_failure(source) and request.status is RequestStatus.TRANSFERRING):
                lost.set()
                return
    finally:
        gone.cancel()
