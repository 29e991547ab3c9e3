"""The prefill worker: whole prefills, whose KV it keeps until a colocated worker has read it (paper section 4.2)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from backend.core.prefill_scheduler import PrefillSchedulerConfig
from backend.core.sampling_params import InvalidRequestError
from backend.engine.async_engine import AsyncEngine
from backend.engine.engine import Engine
from backend.transfer.nixl import NixlTransfer
from components.config import PrefillWorkerConfig, from_command_line
from components.protocol import BlockNews, read_dispatch
from components.runtime import Context, Message, Runtime, run
from components.worker import Worker


class PrefillWorker(Worker[PrefillWorkerConfig]):
    component = "prefill_worker"

    def scheduler_config(self) -> PrefillSchedulerConfig:
        return PrefillSchedulerConfig(self.config.max_prefill_tokens)

    def new_engine(self, engine: Engine, worker_id: int) -> AsyncEngine:
        name = f"{self.component}-{worker_id}"
        self._transfer = NixlTransfer(
            engine.runner.cache, name, self.card.fingerprint, lambda key: self.engine.pulled(key)
        )
        return AsyncEngine(engine, self._transfer, self.config.kv_transfer_overlap)

    async def serve_more(self, runtime: Runtime) -> list[asyncio.Future[Any]]:
        return [runtime.serve(runtime.endpoint(self.component, "kv_source"), self.kv_source, None)]

    async def kv_source(self, message: Message, context: Context) -> AsyncIterator[Message]:
        """What a colocated worker needs to read KV from here."""
        yield {"source": self._transfer.source().to_wire(), "is_done": True}

    async def generate(self, message: Message, context: Context) -> AsyncIterator[Message]:
        """One prefill. With KV to be read the call stays open until it has been, or its lease has ended:
        whoever holds the call holds the pages, and a caller that is gone frees them."""
        try:
            request, _ = read_dispatch(message)
        except (InvalidRequestError, KeyError, TypeError, ValueError) as error:
            yield BlockNews((), True, error=f"unreadable dispatch: {error!r}", is_refusal=True).to_wire()
            return
        stream = self.engine.submit(request)
        lease: asyncio.TimerHandle | None = None
        with self.open_block(stream, context):
            try:
                async for news in self.news(stream):
                    if news.held is not None and not news.held.is_running:
                        lease = asyncio.get_running_loop().call_later(
                            self.config.kv_lease_s, stream.abort, f"nobody read the KV for {self.config.kv_lease_s:g} s"
                        )
                    yield news.to_wire()
            finally:
                if lease is not None:
                    lease.cancel()


def main() -> None:
    config = from_command_line("prefill_worker", PrefillWorkerConfig)
    run(PrefillWorker(config).main, config)


if __name__ == "__main__":
    main()
