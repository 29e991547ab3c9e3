"""The colocated worker: prefills and denoises blocks under the deficit token budget (paper section 4.1).

It also denoises blocks that a prefill worker has prefilled, after reading their KV (section 4.2).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from typing import Any

from backend.core.queries import is_whole
from backend.core.request import Request
from backend.core.sampling_params import InvalidRequestError
from backend.core.scheduler import SchedulerConfig
from backend.engine.async_engine import AsyncEngine
from backend.engine.block_stream import Pull
from backend.engine.engine import Engine
from backend.transfer.base import TransferError, TransferStats
from components.config import ColocatedWorkerConfig, from_command_line
from components.kv_sources import KVSources
from components.protocol import BlockNews, HeldKV, read_dispatch
from components.runtime import Context, Message, Runtime, Workers, run
from components.worker import Worker


class ColocatedWorker(Worker[ColocatedWorkerConfig]):
    component = "colocated_worker"

    def scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(self.config.token_budget, self.config.max_num_seqs)

    def new_engine(self, engine: Engine, worker_id: int) -> AsyncEngine:
        self._cache = engine.runner.cache
        self._logits_shift = engine.runner.model.config.logits_shift
        return AsyncEngine(engine)

    async def serve_more(self, runtime: Runtime) -> list[asyncio.Future[Any]]:
        prefill_workers = await Workers.of(runtime, "prefill_worker", "kv_source")
        name = f"{self.component}-{self.worker_id}"
        self._sources = KVSources(prefill_workers, self._cache, name, self.card.fingerprint)
        prefilled = runtime.serve(runtime.endpoint(self.component, "prefilled"), self.prefilled, None)
        return [asyncio.ensure_future(self._sources.watch()), prefilled]

    async def prefilled(self, message: Message, context: Context) -> AsyncIterator[Message]:
        """What the prefill of a block has committed whose KV is read from here while it runs."""
        held = HeldKV.from_wire(message)
        self.engine.prefilled(held.key, held.commits, held.logprobs)
        yield {"is_done": True}

    async def generate(self, message: Message, context: Context) -> AsyncIterator[Message]:
        try:
            request, held = read_dispatch(message)
        except (InvalidRequestError, KeyError, TypeError, ValueError) as error:
            yield BlockNews((), True, error=f"unreadable dispatch: {error!r}", is_refusal=True).to_wire()
            return
        pull = None
        if held is not None:
            try:
                pull = await self._reader(request, held)
            except TransferError as error:
                self.metrics.ended("lost")
                yield BlockNews((), True, error=f"KV transfer: {error}", is_retryable=True).to_wire()
                return
        stream = self.engine.submit(request, pull)
        with self.open_block(stream, context):
            if held is not None and held.is_running:
                yield BlockNews(()).to_wire()  # from now on `prefilled` finds it
            async for news in self.news(stream):
                yield news.to_wire()

    async def _reader(self, request: Request, held: HeldKV) -> Pull:
        timeout_s = self.config.kv_transfer_timeout_s
        transfer, source = await self._sources.get(held.worker_id, timeout_s)
        # If the next step computes all KV anew, one page is read to tell the source that it may free them all.
        is_unused = not held.is_running and is_whole(request, self._logits_shift)

        def pull(pages: Sequence[int]) -> Future[TransferStats]:
            num_read = 1 if is_unused else len(pages)
            return transfer.pull(
                source,
                held.pages[:num_read],
                pages[:num_read],
                stamp=held.stamp,
                key=held.key,
                timeout_s=timeout_s,
                by_layer=held.is_running,
            )

        return pull


def main() -> None:
    config = from_command_line("colocated_worker", ColocatedWorkerConfig)
    run(ColocatedWorker(config).main, config)


if __name__ == "__main__":
    main()
