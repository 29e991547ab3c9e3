"""What every kind of worker does: serve blocks, publish its load, show its metrics."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from backend.core.sampling_params import InvalidRequestError
from backend.engine.async_engine import AsyncEngine, BlockUpdate, EngineDeadError
from backend.engine.engine import Engine, EngineConfig
from backend.models.config import CheckpointError, ModelConfig
from components.config import ColocatedWorkerConfig
from components.load_bus import LoadBus
from components.protocol import BlockNews, LoadReport, ModelCard, read_dispatch
from components.runtime import Context, Message, Runtime

log = logging.getLogger(__name__)

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def model_card(directory: Path, config: ModelConfig, dtype: str) -> ModelCard:
    """The card of a loaded checkpoint; its fingerprint covers the configuration and the weights' headers."""
    digest = hashlib.sha256(dtype.encode())
    for path in sorted((*directory.glob("config.json"), *directory.glob("*.safetensors"))):
        with path.open("rb") as file:
            digest.update(path.name.encode() + str(path.stat().st_size).encode() + file.read(1 << 20))
    return ModelCard(
        digest.hexdigest()[:16], config.vocab_size, config.mask_token_id, config.eos_token_ids, config.max_position
    )


class WorkerMetrics:
    """Prometheus metrics of one worker, read from the engine's snapshots."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.registry = CollectorRegistry()
        for name, about in (
            ("num_waiting", "Blocks waiting for their prefill"),
            ("num_denoising", "Blocks being denoised"),
            ("waiting_tokens", "Prefill tokens waiting"),
            ("free_pages", "Free KV pages"),
            ("num_pages", "KV pages in all"),
            ("deficit", "Token budget carried forward, in tokens (Algorithm 1)"),
        ):
            gauge = Gauge(f"sangam_worker_{name}", about, registry=self.registry)
            gauge.set_function(lambda name=name: getattr(engine.load, name))  # type: ignore[misc]
        self._totals = {
            name: (Counter(f"sangam_worker_{name}", about, registry=self.registry), [0])
            for name, about in (
                ("num_steps", "Steps run"),
                ("num_prefill_tokens", "Tokens prefilled"),
                ("num_denoising_tokens", "Tokens in denoising steps"),
            )
        }
        self._engine = engine
        self.blocks = Counter("sangam_worker_blocks", "Blocks by outcome", ["outcome"], registry=self.registry)
        self._phases = Histogram(
            "sangam_worker_phase_seconds", "Time of a block per phase", ["phase"],
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self._steps = Histogram(
            "sangam_worker_block_steps", "Forwards per block", buckets=(1, 2, 4, 8, 16, 32, 64), registry=self.registry
        )

    def refresh(self) -> None:
        """Brings the totals up to the engine's; the step loop itself does no metrics work."""
        load = self._engine.load
        for name, (counter, seen) in self._totals.items():
            now = getattr(load, name)
            counter.inc(now - seen[0])
            seen[0] = now

    def block_done(self, update: BlockUpdate) -> None:
        self.blocks.labels("failed" if update.error else "done").inc()
        self._steps.observe(update.num_steps)
        for phase, seconds in zip(("queue", "prefill", "denoising"), update.seconds, strict=True):
            self._phases.labels(phase).observe(seconds)


class Worker:
    """Serves `<component>.generate`: one call is one block of one request."""

    def __init__(self, config: ColocatedWorkerConfig, component: str) -> None:
        self.config = config
        self.component = component

    async def main(self) -> int:
        """Runs until it is told to stop; the exit status."""
        config = self.config
        try:
            engine = await asyncio.to_thread(Engine.from_config, _engine_config(config))
        except (CheckpointError, RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            log.error("cannot serve %s: %s", config.model, error)
            return 1
        bus = await LoadBus.connect(os.environ["NATS_SERVER"], config.namespace)
        runtime = Runtime(config)
        self.engine = AsyncEngine(engine)
        self.engine.start()
        self.metrics = WorkerMetrics(self.engine)
        self._card = model_card(config.model, engine.runner.model.config, config.dtype)
        endpoint = runtime.endpoint(self.component, "generate")
        serving = runtime.serve(endpoint, self.generate, self.metrics.registry)
        reporting = asyncio.ensure_future(self._report(bus, endpoint.connection_id()))
        log.info("serving %s as %s %d", config.model_name, self.component, endpoint.connection_id())
        assert self.engine.died is not None
        forgotten = asyncio.ensure_future(runtime.forgotten(endpoint))
        tasks: set[asyncio.Future[Any]] = {serving, self.engine.died, reporting, forgotten}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if self.engine.died.done():
            log.error("the step loop failed: %s", self.engine.died.result())
            return 1
        if forgotten.done():
            log.error("hung for so long that discovery forgot this process: it has to be started again")
            return 1
        forgotten.cancel()
        reporting.cancel()
        await bus.close()
        if not serving.done():
            log.error("load reports failed: %r", reporting.exception())
            return 1
        await serving
        await self.engine.stop()
        return 0

    async def generate(self, message: Message, context: Context) -> AsyncIterator[Message]:
        """One block: `block_dispatch` in, `BlockNews` out."""
        try:
            request = read_dispatch(message)
        except (InvalidRequestError, KeyError, TypeError) as error:
            yield BlockNews((), True, f"unreadable dispatch: {error!r}", is_refusal=True).to_wire()
            return
        stream = self.engine.submit(request)
        # A handler that nobody reads any more stays suspended at its yield, so this must not depend on it.
        stopped = context.async_killed_or_stopped()
        watch = asyncio.ensure_future(_abort_when(stopped, stream.abort))
        try:
            async for update in stream:
                if update.is_done:
                    self.metrics.block_done(update)
                yield BlockNews(
                    update.tokens, update.is_done, update.error or "", False, update.seconds, update.num_steps
                ).to_wire()
        except InvalidRequestError as error:
            self.metrics.blocks.labels("refused").inc()
            yield BlockNews((), True, str(error), is_refusal=True).to_wire()
        except EngineDeadError as error:
            # The process ends; the router hears the stream break and places the block elsewhere.
            log.error("%s: %s", request.request_id, error)
            await asyncio.Event().wait()
        finally:
            watch.cancel()

    async def _report(self, bus: LoadBus, worker_id: int) -> None:
        while True:
            self.metrics.refresh()
            load = self.engine.load
            await bus.publish(
                LoadReport(
                    worker_id,
                    self._card,
                    load.num_pages * load.page_size,
                    load.free_pages,
                    load.num_pages,
                    load.num_waiting,
                    load.num_denoising,
                    load.waiting_tokens,
                )
            )
            await asyncio.sleep(self.config.load_report_interval_s)


async def _abort_when(stopped: asyncio.Future[bool], abort: object) -> None:
    await stopped
    assert callable(abort)
    abort()


def _engine_config(config: ColocatedWorkerConfig) -> EngineConfig:
    return EngineConfig(
        config.model,
        config.token_budget,
        config.max_num_seqs,
        config.page_size,
        config.kv_cache_tokens,
        config.dtype,
        config.device,
        config.num_threads,
    )
