"""Follows every block to its end: placed, prefilled, handed over, denoised, and placed again when a worker is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from backend.core.ledger import Dispatch
from backend.core.placer import Placer
from backend.core.request import Request, RequestStatus
from backend.core.routing import Policy, Prefill, Route, RouteKind
from backend.core.sampling_params import InvalidRequestError
from backend.core.step import PHASES
from components.block_calls import BlockCalls, BlockLostError, HeldSource, begun
from components.fleet import Fleet
from components.load_bus import LoadBus
from components.protocol import BlockNews, HeldKV
from components.runtime import Context, WorkerLostError, Workers

log = logging.getLogger(__name__)


class RequestFailedError(RuntimeError):
    """The request cannot be completed; the message says why."""


@dataclass
class Trip:
    """What is remembered of a request over its blocks.

    Attributes:
        seconds: time spent per phase so far, summed over blocks and attempts.
        route: how its first block was routed.
        num_steps: forwards of each block that is done.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    route: RouteKind | None = None
    num_steps: list[int] = field(default_factory=list)


class Dispatcher:
    """Runs blocks on the workers that the placer chooses. Lives in one event loop.

    Args:
        calls: see `Fleet`.
        prefilled_calls: the colocated workers' endpoint `prefilled`.
        max_attempts: times that one block may be lost before its request fails.
        worker_timeout_s: silence after which a worker counts as lost.
        placement_timeout_s: how long a block waits while no worker could ever take it.
    """

    def __init__(
        self,
        policy: Policy,
        calls: Mapping[str, Workers],
        prefilled_calls: Workers,
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
        self._block_calls = BlockCalls(self.fleet)
        self._worker_timeout_s = worker_timeout_s
        self._prefilled_calls = prefilled_calls
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
                if context.is_stopped():
                    return
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
            request.sequence_length,
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
        async with self._block_calls.open(route, request, context, "colocated") as news_of:
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
        async with self._block_calls.open(route, request, context, "prefill") as news_of:
            held = None
            async for news in news_of:
                held = news.held
                if held is not None and held.is_running:
                    break
                self.placer.prefilled(dispatch)
                if _take(news, request, trip):
                    yield
                if news.is_done:
                    return
                if held is not None:
                    break
            if held is None:
                return
            source = HeldSource(
                held, news_of, lambda: self.placer.prefilled(dispatch), lambda: self.placer.source_freed(dispatch)
            )
            try:
                async with aclosing(self._denoised(source, dispatch, request, context, trip)) as progress:
                    async for _ in progress:
                        yield
            finally:
                # Before its generator is closed it has to stop running.
                source.done.cancel()
                await asyncio.wait({source.done})

    async def _denoised(
        self, source: HeldSource, dispatch: Dispatch, request: Request, context: Context, trip: Trip
    ) -> AsyncGenerator[None]:
        route = self._early_route(source, dispatch)
        is_early = route is not None
        if source.held.is_running and not is_early:
            # Nobody has room to read it while it runs: it goes the usual way.
            if _take(news := await source.prefilled, request, trip):
                yield
            if news.is_done:
                return
        request.transition(RequestStatus.WAITING_FOR_KV)
        if route is None:
            with _timed(trip, "decode_queue"):
                route = await self._turn(dispatch, context, lambda: self.placer.hand_over(dispatch), source)
        if route is None:
            return
        request.transition(RequestStatus.TRANSFERRING)
        async with (
            self._block_calls.open(route, request, context, "decode", source) as calling,
            begun(calling) as news_of,
        ):
            if is_early:
                if _take(news := await source.prefilled, request, trip):
                    yield
                if news.is_done:
                    return
                async for news in news_of:
                    _take(news, request, trip)
                    # The worker has the block now, so that it can be told of it.
                    await self._tell(route, source.held)
                    break
            async for news in news_of:
                if request.status is RequestStatus.TRANSFERRING and not news.error:
                    request.transition(RequestStatus.DENOISING)
                if _take(news, request, trip):
                    yield
                if news.is_done:
                    return

    def _early_route(self, source: HeldSource, dispatch: Dispatch) -> Route | None:
        """Who reads the KV while the prefill still runs, if that is wanted and somebody has room."""
        if not source.held.is_running:
            return None
        turn = self._turns[dispatch] = asyncio.get_running_loop().create_future()
        try:
            return turn.result() if self.placer.hand_over_early(dispatch) else None
        finally:
            self._turns.pop(dispatch, None)

    async def _tell(self, route: Route, held: HeldKV) -> None:
        """Tells who has read the KV while the prefill ran what that has committed."""
        worker = self.fleet.of(route.load)
        if worker is None:
            raise BlockLostError("the worker left before the block got there")
        try:
            asking = self._prefilled_calls.ask(worker.worker_id, held.to_wire())
            await asyncio.wait_for(asking, self._worker_timeout_s)
        except (WorkerLostError, asyncio.TimeoutError) as error:
            self.fleet.suspect(worker)
            raise BlockLostError(f"{worker.report.component} {worker.worker_id}: {error!r}") from None

    async def _turn(
        self,
        dispatch: Dispatch,
        context: Context,
        begin: Callable[[], None],
        source: HeldSource | None = None,
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
                    waiting.add(source.done)
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if context.is_stopped():
                return None
            if turn.done():
                return turn.result()
            raise BlockLostError(str((source and source.failure) or "the KV is gone before anybody read it"))
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
    start = request.block.frontier
    for token in news.tokens:
        request.block.commit(request.block.frontier, token)
    request.block.logprobs.update(enumerate(news.logprobs, start))
    for phase, seconds in zip(PHASES, news.seconds, strict=True):
        trip.seconds[phase] += seconds
    if news.is_done:
        trip.num_steps.append(news.num_steps)
    return bool(news.tokens)


@contextmanager
def _timed(trip: Trip, phase: str) -> Iterator[None]:
    """Adds the time spent inside to one phase of a trip."""
    started = time.monotonic()
    try:
        yield
    finally:
        trip.seconds[phase] += time.monotonic() - started
