"""The engine in a thread of its own, seen from asyncio: one stream of updates per block."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from backend.core.logprobs import TokenLogprobs
from backend.core.prefill_scheduler import PrefillScheduler
from backend.core.request import Request, RequestStatus
from backend.core.scheduler import Scheduler
from backend.core.step import NO_TIME, StepPlan
from backend.engine.block_stream import BlockStream, BlockUpdate, EngineDeadError, HeldBlock, Pull
from backend.engine.engine import Engine, StepOutput
from backend.transfer.base import KVTransfer, TransferStats


@dataclass(frozen=True)
class EngineLoad:
    """A snapshot of the worker: what it publishes and shows as metrics.

    Attributes:
        num_held: prefilled blocks whose KV waits to be read by others.
        max_older: of a budget that is "auto", see `AutoBudget`; 0 otherwise.
        num_refresh_tokens: of steps in the middle of a block that computed everything anew.
        num_transferring: blocks whose KV this worker reads, or will when it has the pages.
        num_transfer_bytes, transfer_seconds: of all KV read so far.
    """

    num_waiting: int
    num_denoising: int
    num_transferring: int
    num_held: int
    waiting_tokens: int
    free_pages: int
    num_pages: int
    page_size: int
    deficit: int
    max_older: int
    num_steps: int
    num_prefill_tokens: int
    num_refresh_tokens: int
    num_denoising_tokens: int
    num_transfers: int
    num_failed_transfers: int
    num_transfer_bytes: int
    transfer_seconds: float


class AsyncEngine:
    """`submit()` from one event loop; the step loop runs beside it.

    Args:
        transfer: through which others read the KV that a prefill worker keeps. What it hears of
            blocks that have been read is to be passed to `pulled`.
        overlap: whether others may read a layer while the prefill computes the next ones.
    """

    def __init__(self, engine: Engine, transfer: KVTransfer | None = None, overlap: bool = False) -> None:
        self._engine = engine
        self._transfer = transfer
        self._overlap = overlap
        if isinstance(engine.scheduler, PrefillScheduler):
            engine.scheduler.before_free = self._withdraw
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, BlockStream] = {}
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self._num_steps = self._num_prefill_tokens = self._num_refresh_tokens = self._num_denoising_tokens = 0
        self._num_transfers = self._num_failed_transfers = self._num_transfer_bytes = 0
        self._transfer_seconds = 0.0
        self._ended_at = 0.0
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

    def submit(self, request: Request, pull: Pull | None = None) -> BlockStream:
        """Prefills and denoises the request's current block; a prefill worker prefills it and keeps its KV.

        Args:
            pull: reads the KV of a block that was prefilled elsewhere (WAITING_FOR_KV).
        """
        stream = BlockStream(request, pull, lambda stream, reason: self._inbox.put(lambda: self._drop(stream, reason)))
        if self.died is not None and self.died.done():
            stream.put(EngineDeadError(self.died.result()))
        else:
            self._inbox.put(lambda: self._add(stream))
        return stream

    def pulled(self, request_id: str) -> None:
        """Somebody has read the KV of this block: its pages are free within a step. From any thread."""
        self._inbox.put(lambda: self._release(request_id))

    def prefilled(
        self, request_id: str, commits: Sequence[tuple[int, int]], logprobs: Sequence[TokenLogprobs] = ()
    ) -> None:
        """What the prefill of a block has committed whose KV is read from here while it runs."""
        self._inbox.put(lambda: self._prefilled(request_id, commits, logprobs))

    @property
    def load(self) -> EngineLoad:
        """Read without a lock: numbers of one moment, give or take a step."""
        scheduler = self._engine.scheduler
        num_denoising = num_transferring = num_held = deficit = max_older = 0
        if isinstance(scheduler, Scheduler):
            num_denoising, num_transferring = scheduler.num_denoising, scheduler.num_transferring
            deficit = scheduler.budget.deficit
            max_older = scheduler.auto_budget.max_older if scheduler.auto_budget else 0
        elif isinstance(scheduler, PrefillScheduler):
            num_held = scheduler.num_held
        return EngineLoad(
            num_waiting=scheduler.num_waiting,
            num_denoising=num_denoising,
            num_transferring=num_transferring,
            num_held=num_held,
            waiting_tokens=scheduler.waiting_tokens,
            free_pages=scheduler.pool.num_free,
            num_pages=scheduler.pool.num_pages,
            page_size=scheduler.pool.page_size,
            deficit=deficit,
            max_older=max_older,
            num_steps=self._num_steps,
            num_prefill_tokens=self._num_prefill_tokens,
            num_refresh_tokens=self._num_refresh_tokens,
            num_denoising_tokens=self._num_denoising_tokens,
            num_transfers=self._num_transfers,
            num_failed_transfers=self._num_failed_transfers,
            num_transfer_bytes=self._num_transfer_bytes,
            transfer_seconds=self._transfer_seconds,
        )

    # What follows runs in the step loop's thread.

    def _run(self) -> None:
        assert self._loop is not None
        try:
            self._engine.enter()
            is_idle = True
            while self._drain_inbox(is_idle):
                self._start_transfers()
                output = self._engine.step(self._announce if self._overlap else None, time.monotonic())
                is_idle = output is None
                if output is not None:
                    self._publish(output)
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._fail, f"{type(error).__name__}: {error}")
            raise

    def _drain_inbox(self, wait: bool) -> bool:
        """Carries out what was asked; waits for something if there is nothing to run. False: stop."""
        while True:
            try:
                command = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _add(self, stream: BlockStream) -> None:
        assert self._loop is not None
        self._streams[stream.request.request_id] = stream
        try:
            self._engine.scheduler.add(stream.request)
        except ValueError as error:
            del self._streams[stream.request.request_id]
            self._loop.call_soon_threadsafe(stream.put, error)

    def _drop(self, stream: BlockStream, reason: str) -> None:
        request = stream.request
        if self._streams.get(request.request_id) is stream:
            del self._streams[request.request_id]
            scheduler = self._engine.scheduler
            scheduler.abort(request.request_id)
            if stream.has_arrived and not stream.is_prefilled and isinstance(scheduler, Scheduler):
                scheduler.transfer_ended(request.request_id, False)
            self._deliver((stream, BlockUpdate((), True, error=reason, is_retryable=True)))

    def _release(self, request_id: str) -> None:
        scheduler = self._engine.scheduler
        stream = self._streams.get(request_id)
        if stream is not None and isinstance(scheduler, PrefillScheduler):
            if scheduler.release(request_id) is not None:
                del self._streams[request_id]
                self._deliver((stream, BlockUpdate((), True, num_steps=stream.request.block.step)))

    def _withdraw(self, request: Request) -> None:
        """Before pages that others may be reading are freed, these must be able to find out."""
        assert self._transfer is not None, "a prefill worker has a transfer"
        self._transfer.invalidate(request.pages)
        self._transfer.forget(request.request_id)

    def _announce(self, plan: StepPlan) -> Callable[[int], None]:
        """Lets others begin to read what this step prefills."""
        transfer = self._transfer
        assert transfer is not None, "a prefill worker has a transfer"
        for request in plan.prefills:
            transfer.begin(request.pages)
            transfer.expect(request.request_id)
            held = HeldBlock(tuple(request.pages), transfer.stamp(request.pages), (), is_running=True)
            self._deliver((self._streams[request.request_id], BlockUpdate((), False, held)))

        def on_layer(layer: int) -> None:
            for request in plan.prefills:
                transfer.set_progress(request.pages, layer + 1)

        return on_layer

    def _start_transfers(self) -> None:
        scheduler = self._engine.scheduler
        if not isinstance(scheduler, Scheduler):
            return
        for request in scheduler.start_transfers():
            stream = self._streams[request.request_id]
            stream.started_at = time.monotonic()
            assert stream.pull is not None, "a block that waits for KV comes with the means to read it"
            future = stream.pull(request.pages)
            future.add_done_callback(
                lambda future, stream=stream: self._inbox.put(lambda: self._transfer_ended(scheduler, stream, future))  # type: ignore[misc]
            )

    def _transfer_ended(self, scheduler: Scheduler, stream: BlockStream, future: Future[TransferStats]) -> None:
        error = future.exception()
        if error is None:
            stats = future.result()
            self._num_transfers += 1
            self._num_transfer_bytes += stats.num_bytes
            self._transfer_seconds += stats.seconds
            stream.has_arrived = True
            if stream.is_prefilled or self._streams.get(stream.request.request_id) is not stream:
                self._join(scheduler, stream)
        else:
            self._num_failed_transfers += 1
            request = scheduler.transfer_ended(stream.request.request_id, False)
            if request is not None:
                del self._streams[request.request_id]
                self._deliver((stream, BlockUpdate((), True, error=f"KV transfer: {error}", is_retryable=True)))

    def _prefilled(
        self, request_id: str, commits: Sequence[tuple[int, int]], logprobs: Sequence[TokenLogprobs]
    ) -> None:
        scheduler, stream = self._engine.scheduler, self._streams.get(request_id)
        if stream is None or stream.is_prefilled or not isinstance(scheduler, Scheduler):
            return
        stream.request.commit(commits, logprobs)
        stream.sent = stream.request.block.frontier
        stream.is_prefilled = True
        if stream.has_arrived:
            self._join(scheduler, stream)

    def _join(self, scheduler: Scheduler, stream: BlockStream) -> None:
        """All is there: the block is denoised from the next step on, unless it was aborted meanwhile."""
        request = scheduler.transfer_ended(stream.request.request_id, True)
        if request is not None:
            stream.ready_at = time.monotonic()
            self._deliver((stream, BlockUpdate((), False, num_steps=request.block.step)))

    def _publish(self, output: StepOutput) -> None:
        now = time.monotonic()
        # One that was launched ahead began when the one before it ended.
        started, self._ended_at = max(output.started_at, self._ended_at), now
        plan = output.plan
        self._num_steps += 1
        updates: list[tuple[BlockStream, BlockUpdate]] = []
        first_steps: set[str] = set()
        for request in plan.prefills:
            if request.block.step > 1:  # in the middle of its block
                self._num_refresh_tokens += request.sequence_length
            else:
                self._num_prefill_tokens += request.sequence_length
                first_steps.add(request.request_id)
                stream = self._streams[request.request_id]
                stream.started_at, stream.ready_at = started, now
        self._num_denoising_tokens += plan.decode_tokens
        left = {request.request_id for request in output.left}
        for request in (*plan.prefills, *plan.decodes):
            stream = self._streams[request.request_id]
            frontier = request.block.frontier
            is_done = request.request_id in left
            if frontier == stream.sent and not is_done and request.request_id not in first_steps:
                continue
            tokens = tuple(request.block.committed_prefix()[stream.sent :])
            logprobs = request.block.logprobs_at(range(stream.sent, frontier))
            stream.sent = frontier
            held = self._held(request)
            seconds = stream.seconds(now) if is_done or held else NO_TIME
            if is_done:
                del self._streams[request.request_id]
            error = output.errors.get(request.request_id)
            update = BlockUpdate(
                tokens, is_done, held, error, seconds=seconds, num_steps=request.block.step, logprobs=logprobs
            )
            updates.append((stream, update))
        self._deliver(*updates)

    def _held(self, request: Request) -> HeldBlock | None:
        if request.status is not RequestStatus.WAITING_FOR_KV:
            return None
        assert self._transfer is not None, "a prefill worker has a transfer"
        if not self._overlap:
            self._transfer.expect(request.request_id)
        commits = tuple((i, token) for i, token in enumerate(request.block.tokens) if token is not None)
        logprobs = request.block.logprobs_at(offset for offset, _ in commits)
        return HeldBlock(tuple(request.pages), self._transfer.stamp(request.pages), commits, logprobs=logprobs)

    def _deliver(self, *updates: tuple[BlockStream, BlockUpdate]) -> None:
        assert self._loop is not None
        if updates:
            self._loop.call_soon_threadsafe(_put, updates)

    def _fail(self, reason: str) -> None:
        """Runs in the event loop: nobody may wait for a step that never comes."""
        assert self.died is not None
        self.died.set_result(reason)
        for stream in self._streams.values():
            stream.put(EngineDeadError(reason))


def _put(updates: Sequence[tuple[BlockStream, BlockUpdate]]) -> None:
    for stream, update in updates:
        stream.put(update)
