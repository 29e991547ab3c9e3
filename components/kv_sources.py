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
_ASK_S = 10.0
_CONNECT_S = 10.0


class KVSources:
    """Knows each prefill worker's `KVSource` before the first block comes from it.

    The NIXL agent is made when the first prefill worker shows up: a colocated graph does without.
    Many blocks wait for the same task, so none of them cancels it, and what has failed is tried anew.
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
            TransferError: it cannot be reached in time, or no agent can be made.
        """
        task = self._sources.get(worker_id)
        if task is None or _has_failed(task):
            task = self._fetch(worker_id)
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            raise TransferError(f"prefill worker {worker_id} did not say within {timeout_s:g} s where its KV lies")
        if _has_failed(task):
            raise TransferError(f"prefill worker {worker_id} cannot be read from: {_reason(task)}")
        return await self._started(), task.result()

    def _fetch(self, worker_id: int) -> asyncio.Task[KVSource]:
        task = self._sources[worker_id] = asyncio.ensure_future(asyncio.wait_for(self._ask(worker_id), _ASK_S))
        task.add_done_callback(_seen)
        return task

    async def _ask(self, worker_id: int) -> KVSource:
        transfer = await self._started()
        source = KVSource.from_wire((await self._workers.ask(worker_id, {}))["source"])
        # The first read from a peer costs a tenth of a second more than the others: let no request pay for it.
        transfer.connect(source, timeout_s=_CONNECT_S).add_done_callback(_log_failure)
        return source

    async def _started(self) -> KVTransfer:
        if self._transfer is None or _has_failed(self._transfer):
            self._transfer = asyncio.ensure_future(asyncio.to_thread(self._new_transfer))
            self._transfer.add_done_callback(_seen)
        return await asyncio.shield(self._transfer)

    def _new_transfer(self) -> KVTransfer:
        return NixlTransfer(self._cache, self._name, self._model, lambda key: None)

    def _forget(self, worker_id: int) -> None:
        task = self._sources.pop(worker_id)
        if task.done() and not _has_failed(task) and self._transfer is not None and not _has_failed(self._transfer):
            self._transfer.result().drop_peer(task.result().name)


def _has_failed(task: asyncio.Task[KVSource] | asyncio.Task[KVTransfer]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _reason(task: asyncio.Task[KVSource]) -> str:
    return "cancelled" if task.cancelled() else repr(task.exception())


def _seen(task: asyncio.Task[KVSource] | asyncio.Task[KVTransfer]) -> None:
    """Whoever waits for it is told; nobody may be waiting yet."""
    if _has_failed(task) and not task.cancelled():
        log.warning("KV transfers: %r", task.exception())


def _log_failure(connecting: Future[None]) -> None:
    if error := connecting.exception():
        log.warning("no connection for KV transfers yet: %s", error)
