"""The engine in a thread of its own, seen from asyncio: one stream of updates per block."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from backend.core.request import Request
from backend.engine.engine import Engine, StepOutput


@dataclass(frozen=True)
class BlockUpdate:
    """News of one block.

    Attributes:
        tokens: what the frontier moved over since the last update.
        is_prefilled: its prefill's forward has run.
        is_done: the engine is done with this block; no update follows.
        error: why the request failed, if it did.
        seconds: at the end, time spent per phase: queue, prefill, denoising.
        num_steps: forwards this block took part in so far.
    """

    tokens: tuple[int, ...]
    is_prefilled: bool
    is_done: bool
    error: str | None = None
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    num_steps: int = 0


@dataclass(frozen=True)
class EngineLoad:
    """A snapshot of the worker: what it publishes and shows as metrics."""

    num_waiting: int
    num_denoising: int
    waiting_tokens: int
    free_pages: int
    num_pages: int
    page_size: int
    deficit: int
    num_steps: int
    num_prefill_tokens: int
    num_denoising_tokens: int


class EngineDeadError(RuntimeError):
    """The step loop has stopped; the process should end and be started again."""


class BlockStream:
    """One block's updates, to be read by one task of the event loop; see `AsyncEngine.submit`."""

    def __init__(self, request: Request, abort: Callable[[BlockStream], None]) -> None:
        self.request = request
        self._abort = abort
        self._updates: asyncio.Queue[BlockUpdate | Exception] = asyncio.Queue()
        self.sent = 0
        self.added_at = time.monotonic()
        self.started_at = self.prefilled_at = 0.0

    def abort(self) -> None:
        """Frees what the block holds within a step; the stream then ends with an error. Idempotent."""
        self._abort(self)

    def put(self, item: BlockUpdate | Exception) -> None:
        self._updates.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[BlockUpdate]:
        """Updates that came while the reader was busy come as one.

        Raises:
            InvalidRequestError: the request can never fit this worker.
            EngineDeadError: the step loop has failed.
        """
        done = False
        try:
            while not done:
                update = _update(await self._updates.get())
                while not self._updates.empty():
                    update = _merged(update, _update(self._updates.get_nowait()))
                done = update.is_done
                yield update
        finally:
            if not done:
                self.abort()


class AsyncEngine:
    """`submit()` from one event loop; the step loop runs beside it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, BlockStream] = {}
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self._num_steps = self._num_prefill_tokens = self._num_denoising_tokens = 0
        self.died: asyncio.Future[str] | None = None
        """Resolves with the reason when the step loop fails."""

    def start(self) -> None:
        """Starts the step loop; call from the event loop that will use the engine."""
        self._loop = asyncio.get_running_loop()
        self.died = self._loop.create_future()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the step loop after the step it is in."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def submit(self, request: Request) -> BlockStream:
        """Prefills and denoises the request's current block."""
        stream = BlockStream(request, lambda stream: self._inbox.put(lambda: self._drop(stream)))
        if self.died is not None and self.died.done():
            stream.put(EngineDeadError(self.died.result()))
        else:
            self._inbox.put(lambda: self._add(stream))
        return stream

    @property
    def load(self) -> EngineLoad:
        """Read without a lock: numbers of one moment, give or take a step."""
        scheduler = self._engine.scheduler
        return EngineLoad(
            scheduler.num_waiting,
            scheduler.num_denoising,
            scheduler.waiting_tokens,
            scheduler.pool.num_free,
            scheduler.pool.num_pages,
            scheduler.pool.page_size,
            scheduler.budget.deficit,
            self._num_steps,
            self._num_prefill_tokens,
            self._num_denoising_tokens,
        )

    # What follows runs in the step loop's thread.

    def _run(self) -> None:
        assert self._loop is not None
        try:
            while self._drain_inbox():
                started = time.monotonic()
                output = self._engine.step()
                if output is not None:
                    self._publish(output, started)
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._fail, f"{type(error).__name__}: {error}")
            raise

    def _drain_inbox(self) -> bool:
        """Carries out what was asked; waits for work if there is none. False: stop."""
        while True:
            try:
                command = self._inbox.get(block=not self._engine.scheduler.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _add(self, stream: BlockStream) -> None:
        assert self._loop is not None
        self._streams[stream.request.request_id] = stream
        try:
            self._engine.scheduler.add(stream.request)
        except ValueError as error:
            del self._streams[stream.request.request_id]
            self._loop.call_soon_threadsafe(stream.put, error)

    def _drop(self, stream: BlockStream) -> None:
        assert self._loop is not None
        if self._streams.get(stream.request.request_id) is stream:
            del self._streams[stream.request.request_id]
            self._engine.scheduler.abort(stream.request.request_id)
            self._loop.call_soon_threadsafe(stream.put, BlockUpdate((), False, True, "aborted"))

    def _publish(self, output: StepOutput, started: float) -> None:
        now = time.monotonic()
        plan = output.plan
        self._num_steps += 1
        updates: list[tuple[BlockStream, BlockUpdate]] = []
        for request in plan.prefills:
            stream = self._streams[request.request_id]
            stream.started_at, stream.prefilled_at = started, now
            self._num_prefill_tokens += request.sequence_length
        for request in plan.decodes:
            self._num_denoising_tokens += request.block.length
        left = {request.request_id for request in output.left}
        num_prefills = len(plan.prefills)
        for i, request in enumerate((*plan.prefills, *plan.decodes)):
            stream = self._streams[request.request_id]
            frontier = request.block.frontier
            is_done = request.request_id in left
            if frontier == stream.sent and i >= num_prefills and not is_done:
                continue
            tokens = tuple(request.block.committed_prefix()[stream.sent :])
            stream.sent = frontier
            seconds = (0.0, 0.0, 0.0)
            if is_done:
                del self._streams[request.request_id]
                seconds = (
                    stream.started_at - stream.added_at,
                    stream.prefilled_at - stream.started_at,
                    now - stream.prefilled_at,
                )
            error = output.errors.get(request.request_id)
            updates.append((stream, BlockUpdate(tokens, True, is_done, error, seconds, request.block.step)))
        if updates:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(_deliver, updates)

    def _fail(self, reason: str) -> None:
        """Runs in the event loop: nobody may wait for a step that never comes."""
        assert self.died is not None
        self.died.set_result(reason)
        for stream in self._streams.values():
            stream.put(EngineDeadError(reason))


def _deliver(updates: list[tuple[BlockStream, BlockUpdate]]) -> None:
    for stream, update in updates:
        stream.put(update)


def _update(item: BlockUpdate | Exception) -> BlockUpdate:
    if isinstance(item, Exception):
        raise item
    return item


def _merged(first: BlockUpdate, then: BlockUpdate) -> BlockUpdate:
    return BlockUpdate(first.tokens + then.tokens, True, then.is_done, then.error, then.seconds, then.num_steps)
