"""What every kind of worker does: serve blocks, publish its load, show its metrics, drain."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from backend.core.prefill_scheduler import PrefillSchedulerConfig
from backend.core.sampling_params import InvalidRequestError
from backend.core.scheduler import SchedulerConfig
from backend.engine.async_engine import AsyncEngine
from backend.engine.block_stream import BlockStream, BlockUpdate, EngineDeadError
from backend.engine.engine import Engine
from backend.models.config import CheckpointError
from components.checkpoint import engine_config, model_card
from components.config import WorkerConfig
from components.load_bus import LoadBus
from components.protocol import BlockNews, HeldKV, LoadReport
from components.runtime import Context, Message, Runtime
from components.worker_metrics import WorkerMetrics

log = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.1
_IDLE_S = 1.0
# A router hears of the drain with the next report; what it has sent until then still arrives.
_DRAIN_REPORTS = 3

ConfigT = TypeVar("ConfigT", bound=WorkerConfig)


class Worker(Generic[ConfigT]):
    """Serves `<component>.generate`: one call is one block of one request."""

    component: str

    def __init__(self, config: ConfigT) -> None:
        self.config = config
        self._is_draining = False
        self._num_open = 0

    def scheduler_config(self) -> SchedulerConfig | PrefillSchedulerConfig:
        """What makes the engine a colocated worker's or a prefill worker's."""
        raise NotImplementedError

    def new_engine(self, engine: Engine, worker_id: int) -> AsyncEngine:
        return AsyncEngine(engine)

    async def serve_more(self, runtime: Runtime) -> list[asyncio.Future[Any]]:
        """What a kind of worker runs beside its main endpoint, for as long as it lives."""
        return []

    async def generate(self, message: Message, context: Context) -> AsyncIterator[Message]:
        """One block: `block_dispatch` in, `BlockNews` out."""
        raise NotImplementedError
        yield {}

    async def main(self) -> int:
        """Runs until it is told to stop or has drained (0), or cannot go on (1)."""
        config = self.config
        on_this_machine = engine_config(config, self.scheduler_config())
        try:
            engine = await asyncio.to_thread(Engine.from_config, on_this_machine)
        except (CheckpointError, RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            log.error("cannot serve %s: %s", config.model, error)
            return 1
        self.card = model_card(config.model, engine.runner.model.config, on_this_machine.dtype)
        bus = await LoadBus.connect(os.environ["NATS_SERVER"], config.namespace)
        self.runtime = runtime = Runtime(config)
        endpoint = runtime.endpoint(self.component, "generate")
        self.worker_id = endpoint.connection_id()
        self.engine = self.new_engine(engine, self.worker_id)
        self.engine.start()
        self.metrics = WorkerMetrics(self.engine)
        runtime.on_post("drain", self._drain)
        more = await self.serve_more(runtime)
        serving = runtime.serve(endpoint, self.generate, self.metrics.registry)
        reporting = asyncio.ensure_future(self._report(bus))
        place = f"on {on_this_machine.device} in {on_this_machine.dtype}"
        log.info("serving %s as %s %d %s", config.model_name, self.component, self.worker_id, place)
        assert self.engine.died is not None
        forgotten = asyncio.ensure_future(runtime.forgotten(endpoint))
        tasks: set[asyncio.Future[Any]] = {serving, self.engine.died, reporting, forgotten, *more}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if self.engine.died.done():
            log.error("the step loop failed: %s", self.engine.died.result())
            return 1
        if forgotten.done():
            log.error("hung for so long that discovery forgot this process: it has to be started again")
            return 1
        if not runtime.was_told_to_stop:
            failed = next((task for task in (reporting, *more) if task.done()), None)
            log.error("cannot go on: %r", failed.exception() if failed else "Dynamo's runtime has shut down")
            return 1
        forgotten.cancel()
        await serving
        reporting.cancel()
        await bus.close()
        await self.engine.stop()
        return 0

    @contextmanager
    def open_block(self, stream: BlockStream, context: Context) -> Iterator[None]:
        """Frees what the block holds as soon as its caller is gone.

        A handler that nobody reads any more stays suspended at its yield, so this does not depend on it.
        """
        watch = asyncio.ensure_future(_abort_when(context.async_killed_or_stopped(), stream))
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            watch.cancel()

    async def news(self, stream: BlockStream) -> AsyncIterator[BlockNews]:
        """What the engine says of a block, as the router is told it."""
        request = stream.request
        try:
            async for update in stream:
                self._count(update)
                held = None
                if update.held is not None:
                    kv = update.held
                    held = HeldKV(
                        self.worker_id, request.request_id, kv.pages, kv.stamp, kv.commits, kv.is_running, kv.logprobs
                    )
                yield BlockNews(
                    update.tokens,
                    update.is_done,
                    held,
                    update.error or "",
                    is_retryable=update.is_retryable,
                    seconds=update.seconds,
                    num_steps=update.num_steps,
                    logprobs=update.logprobs,
                )
        except InvalidRequestError as error:
            self.metrics.ended("refused")
            yield BlockNews((), True, error=str(error), is_refusal=True)
        except EngineDeadError as error:
            # The process ends; the router hears the stream break and places the block elsewhere.
            log.error("%s: %s", request.request_id, error)
            await asyncio.Event().wait()

    def _count(self, update: BlockUpdate) -> None:
        if any(update.seconds):
            self.metrics.observe(update)
        if update.is_done:
            lost = "lost" if update.is_retryable else "failed"
            self.metrics.ended(lost if update.error else "done")

    async def _drain(self, body: Message) -> Message:
        """Takes no more, finishes what it has, leaves."""
        if not self._is_draining:
            self._is_draining = True
            log.info("draining")
            asyncio.ensure_future(self._leave_when_idle()).add_done_callback(_log_failure)
        return {"status": "draining", "num_open": self._num_open}

    async def _leave_when_idle(self) -> None:
        await asyncio.sleep(_DRAIN_REPORTS * self.config.load_report_interval_s)
        idle_s = 0.0
        while idle_s < _IDLE_S:  # the last worker of its kind gets the next block of what it has begun
            await asyncio.sleep(_DRAIN_POLL_S)
            idle_s = 0.0 if self._num_open else idle_s + _DRAIN_POLL_S
        log.info("drained")
        self.runtime.shutdown()

    async def _report(self, bus: LoadBus) -> None:
        while True:
            self.metrics.refresh()
            load = self.engine.load
            report = LoadReport(
                self.worker_id,
                self.component,
                self.card,
                self._is_draining,
                load.page_size,
                load.num_pages,
                load.free_pages,
                load.num_waiting,
                load.num_denoising,
                load.waiting_tokens,
            )
            await bus.publish(report)
            await asyncio.sleep(self.config.load_report_interval_s)


async def _abort_when(stopped: asyncio.Future[bool], stream: BlockStream) -> None:
    await stopped
    stream.abort()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception():
        log.error("draining failed: %r", task.exception())
