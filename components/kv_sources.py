"""Which prefill workers a colocated worker can read KV from: their addresses, fetched through the graph."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future

from backend.attention.kv_cache import KVCache
from backend.transfer.base import KVSource, KVTransfer, TransferError
from backend.transfer.nixl import NixlTransfer
from components.runtime import Workers

log = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.5
_CONNECT_S = 10.0


class KVSources:
    """Knows each prefill worker's `KVSource` before the first block comes from it.

    The NIXL agent is made when the first prefill worker shows up: a colocated graph does without.
    """

    def __init__(self, workers: Workers, cache: KVCache, name: str, model: str) -> None:
        self._workers = workers
        self._cache, self._name, self._model = cache, name, model
        self._transfer: asyncio.Task[KVTransfer] | None = None
        self._sources: dict[int, asyncio.Task[KVSource]] = {}

    async def watch(self) -> None:
        """Fetches what is new and forgets what is gone; never returns."""
        while True:
            listed = set(self._workers.ids())
            for worker_id in listed - set(self._sources):
                self._fetch(worker_id)
            for worker_id in set(self._sources) - listed:
                self._forget(worker_id)
            await asyncio.sleep(_WATCH_INTERVAL_S)

    async def get(self, worker_id: int, timeout_s: float) -> tuple[KVTransfer, KVSource]:
        """The means to read from a prefill worker.

        Raises:
            TransferError: it cannot be reached.
        """
        source = self._sources.get(worker_id) or self._fetch(worker_id)
        try:
            return await asyncio.wait_for(asyncio.shield(self._both(source)), timeout_s)
        except (TransferError, asyncio.TimeoutError, RuntimeError) as error:
            self._forget(worker_id)
            raise TransferError(f"prefill worker {worker_id} cannot be reached: {error!r}") from None

    async def _both(self, source: asyncio.Task[KVSource]) -> tuple[KVTransfer, KVSource]:
        return await self._started(), await source

    async def _started(self) -> KVTransfer:
        if self._transfer is None:
            self._transfer = asyncio.ensure_future(asyncio.to_thread(self._new_transfer))
        return await self._transfer

    def _new_transfer(self) -> KVTransfer:
        return NixlTransfer(self._cache, self._name, self._model, lambda key: None)

    def _fetch(self, worker_id: int) -> asyncio.Task[KVSource]:
        task = asyncio.ensure_future(self._ask(worker_id))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # told to whoever waits for it
        self._sources[worker_id] = task
        return task

    async def _ask(self, worker_id: int) -> KVSource:
        transfer = await self._started()
        source = KVSource.from_wire((await self._workers.ask(worker_id, {}))["source"])
        # The first read from a peer costs a tenth of a second more than the others: let no request pay for it.
        transfer.connect(source, timeout_s=_CONNECT_S).add_done_callback(_log_failure)
        return source

    def _forget(self, worker_id: int) -> None:
        task = self._sources.pop(worker_id, None)
        if task is None:
            return
        if task.done() and not task.cancelled() and task.exception() is None:
            if self._transfer is not None and self._transfer.done():
                self._transfer.result().drop_peer(task.result().name)
        task.cancel()


def _log_failure(connecting: Future[None]) -> None:
    if error := connecting.exception():
        log.warning("no connection for KV transfers yet: %s", error)
