"""Calls of workers for a block: what they say, how they are stopped, and when they count as lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from backend.core.request import Request, RequestStatus
from backend.core.routing import Route
from components.fleet import Fleet, FleetWorker
from components.protocol import BlockNews, HeldKV, block_dispatch
from components.runtime import Context, WorkerLostError


class BlockLostError(RuntimeError):
    """This attempt at the block came to nothing, another one may succeed."""

    def __init__(self, message: str, *, is_transfer: bool = False) -> None:
        super().__init__(message)
        self.is_transfer = is_transfer


class HeldSource:
    """A prefill worker's call from the moment that it holds KV: followed until its pages are free.

    Attributes:
        held: the last it said of where the KV lies.
        prefilled: what it says when the prefill has run, if that is still to come.
        done: ends when the pages are free, with BlockLostError if nobody has read them by then.
    """

    def __init__(
        self,
        held: HeldKV,
        news_of: AsyncIterator[BlockNews],
        on_prefilled: Callable[[], None],
        on_freed: Callable[[], None],
    ) -> None:
        self.held = held
        self.prefilled: asyncio.Future[BlockNews] = asyncio.get_running_loop().create_future()
        self._on_prefilled, self._on_freed = on_prefilled, on_freed
        self.done = asyncio.ensure_future(self._follow(news_of))
        self.done.add_done_callback(self._settle)

    async def _follow(self, news_of: AsyncIterator[BlockNews]) -> None:
        async for news in news_of:
            if self.held.is_running:
                self._on_prefilled()
                if news.held is not None:
                    self.held = news.held
                self.prefilled.set_result(news)
            elif news.error:
                # As after a failed transfer: it waited for too long, and would again.
                raise BlockLostError(news.error, is_transfer=True)
            if news.is_done:
                self._on_freed()
                return
        raise BlockLostError("the prefill worker's stream ended before the KV was read")

    @property
    def failure(self) -> BaseException | None:
        """Why the KV is gone, if it is gone unread."""
        return self.done.exception() if self.done.done() and not self.done.cancelled() else None

    def _settle(self, done: asyncio.Future[None]) -> None:
        if self.prefilled.done():
            return
        if self.failure is None:
            self.prefilled.cancel()
        else:
            self.prefilled.set_exception(self.failure)
            self.prefilled.exception()  # often nobody waits for it


class BlockCalls:
    """Calls to the workers that routes name."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    @asynccontextmanager
    async def open(
        self,
        route: Route,
        request: Request,
        context: Context,
        what: str,
        source: HeldSource | None = None,
    ) -> AsyncIterator[AsyncIterator[BlockNews]]:
        """A call of a worker for the request's current block; leaving it ends the call.

        Args:
            source: where the KV lies that the worker has to read first.
        """
        worker = self._fleet.of(route.load)
        if worker is None:
            raise BlockLostError("the worker left before the block got there")
        # Concurrent calls must not share a context; a detached one is not stopped with its parent.
        name = f"{request.request_id}/{request.block.index}.{request.block.attempt}/{what}"
        call_context = context.detached(name)
        link = asyncio.ensure_future(_stop_when(context.async_killed_or_stopped(), call_context))
        lost = asyncio.Event()
        losing = asyncio.ensure_future(_set_when(lost, worker, source, request))
        message = block_dispatch(request, source.held if source else None)
        messages = self._fleet.calls(worker).call(worker.worker_id, message, call_context, lost)
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
        source: HeldSource | None,
        context: Context,
    ) -> AsyncGenerator[BlockNews]:
        """A worker's news, up to the last; ends early, without an error, when `context` is stopped."""
        try:
            async for message in messages:
                news = BlockNews.from_wire(message)
                yield news
                if news.is_done:
                    worker.num_breaks = 0
                    return
            if not context.is_stopped():
                raise WorkerLostError("the stream ended before the block was done")
        except WorkerLostError as error:
            if source is not None and source.failure and not worker.lost.is_set():
                raise BlockLostError(str(source.failure)) from None
            self._fleet.suspect(worker)
            raise BlockLostError(f"{worker.report.component} {worker.worker_id}: {error}") from None


@asynccontextmanager
async def begun(news_of: AsyncIterator[BlockNews]) -> AsyncIterator[AsyncIterator[BlockNews]]:
    """The same, from a call that is made at once and not when somebody asks for its first news."""
    first = asyncio.ensure_future(anext(news_of, None))

    async def all_of_it() -> AsyncGenerator[BlockNews]:
        news = await first
        if news is not None:
            yield news
            async for news in news_of:
                yield news

    try:
        async with aclosing(all_of_it()) as again:
            yield again
    finally:
        first.cancel()
        await asyncio.wait({first})


async def _stop_when(stopped: asyncio.Future[bool], context: Context) -> None:
    await stopped
    context.stop_generating()


async def _set_when(lost: asyncio.Event, worker: FleetWorker, source: HeldSource | None, request: Request) -> None:
    """Sets `lost` when the worker is, or when what it has to read is gone before it has read it."""
    gone = asyncio.ensure_future(worker.lost.wait())
    waiting: set[asyncio.Future[Any]] = {gone, *([source.done] if source else [])}
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            is_unread = request.status is RequestStatus.TRANSFERRING
            if gone in done or (source is not None and source.failure and is_unread):
                lost.set()
                return
    finally:
        gone.cancel()
