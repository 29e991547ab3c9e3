"""KV transfer between workers of one process: the same rules as `nixl`, for tests."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from backend.attention.kv_cache import KVCache
from backend.transfer.base import KVLayout, KVSource, TransferError, TransferStats, check_layout, check_pages
from backend.transfer.offering import Offering

Result = TypeVar("Result")


_PROGRESS_INTERVAL_S = 1e-3


class _NotYet(Exception):
    """To be tried again."""


class LocalNetwork:
    """Where the transfers of one process find each other."""

    def __init__(self) -> None:
        self.peers: dict[bytes, LocalTransfer] = {}


class LocalTransfer(Offering):
    """A `KVTransfer`. It copies one sequence at a time, in a thread of its own."""

    def __init__(
        self, cache: KVCache, name: str, model: str, on_pulled: Callable[[str], None], network: LocalNetwork
    ) -> None:
        self.name = name
        self.cache = cache
        self.num_pages = cache.data.shape[2] - 1
        super().__init__(self.num_pages, cache.data.device, on_pulled)
        self._layout = KVLayout.of(cache, model)
        self._agent = uuid.uuid4().bytes
        self._peers = network.peers
        self._peers[self._agent] = self
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def source(self) -> KVSource:
        return KVSource(self.name, self._layout, self.num_pages, "cpu", 0, self._agent, 0, 0, 0)

    def pull(
        self,
        source: KVSource,
        source_pages: Sequence[int],
        pages: Sequence[int],
        *,
        stamp: int,
        key: str,
        timeout_s: float,
        by_layer: bool = False,
    ) -> Future[TransferStats]:
        started = time.monotonic()

        num_read = 0

        def copy() -> TransferStats:
            nonlocal num_read
            peer = self._peer(source, started + timeout_s)
            check_pages(self.num_pages, source, source_pages, pages)
            num_layers = self._layout.num_layers
            num_complete = int(peer.stamps.progress[source_pages[0]]) if by_layer else num_layers
            released = TransferError(f"{source.name} released the pages of {key} meanwhile")
            if not num_read <= num_complete <= num_layers:
                raise released
            layers = slice(num_read, num_complete)
            self.cache.data[layers, :, list(pages)] = peer.cache.data[layers, :, list(source_pages)]
            num_read = num_complete
            if num_read < num_layers:
                raise _NotYet
            if peer.stamp(source_pages) != stamp:
                raise released
            peer.notify(key)
            num_bytes = 2 * num_layers * len(pages) * self._layout.page_bytes
            return TransferStats(num_bytes, time.monotonic() - started)

        return self._submit(copy)

    def connect(self, source: KVSource, *, timeout_s: float) -> Future[None]:
        deadline = time.monotonic() + timeout_s
        return self._submit(lambda: None if self._peer(source, deadline) else None)

    def drop_peer(self, name: str) -> None:
        """Nothing is kept of a peer here."""

    def close(self) -> None:
        self._peers.pop(self._agent, None)
        self._mailbox.close()
        self._thread.join()

    def notify(self, key: str) -> None:
        """A peer has pulled `key`."""
        self._mailbox.put(lambda: self._pulled(key))

    def _peer(self, source: KVSource, deadline: float) -> LocalTransfer:
        check_layout(self._layout, source)
        if self._agent not in self._peers:
            raise TransferError(f"{self.name} is closed")
        if source.agent not in self._peers or time.monotonic() > deadline:
            raise TransferError(f"{source.name} did not answer in time")
        return self._peers[source.agent]

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(work())
            except TransferError as error:
                future.set_exception(error)
            except _NotYet:
                time.sleep(_PROGRESS_INTERVAL_S)
                put()

        def put() -> None:
            if not self._mailbox.put(run):
                future.set_exception(TransferError(f"{self.name} is closed"))

        put()
        return future

    def _run(self) -> None:
        while self._mailbox.work(None):
            pass
