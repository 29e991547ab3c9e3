"""KV transfer between workers of one process: the same rules as `nixl`, for tests."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from backend.attention.kv_cache import KVCache
from backend.transfer.base import KVLayout, KVSource, TransferError, TransferStats, check_pull
from backend.transfer.mailbox import Mailbox
from backend.transfer.stamps import PageStamps

Result = TypeVar("Result")


class LocalNetwork:
    """Where the transfers of one process find each other."""

    def __init__(self) -> None:
        self.peers: dict[bytes, LocalTransfer] = {}


class LocalTransfer:
    """A `KVTransfer`. It copies one sequence at a time, in a thread of its own."""

    def __init__(
        self, cache: KVCache, name: str, model: str, on_pulled: Callable[[str], None], network: LocalNetwork
    ) -> None:
        self.name = name
        self.cache = cache
        self.num_pages = cache.data.shape[2] - 1
        self.stamps = PageStamps(self.num_pages)
        self._layout = KVLayout.of(cache, model)
        self._agent = uuid.uuid4().bytes
        self._on_pulled = on_pulled
        self._expected: set[str] = set()
        self._peers = network.peers
        self._peers[self._agent] = self
        self._mailbox = Mailbox()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def source(self) -> KVSource:
        return KVSource(self.name, self._layout, self.num_pages, "cpu", 0, self._agent, 0, 0)

    def stamp(self, pages: Sequence[int]) -> int:
        return self.stamps.stamp(pages)

    def invalidate(self, pages: Sequence[int]) -> None:
        self.stamps.invalidate(pages)

    def expect(self, key: str) -> None:
        self._mailbox.put(lambda: self._expected.add(key))

    def forget(self, key: str) -> None:
        self._mailbox.put(lambda: self._expected.discard(key))

    def pull(
        self,
        source: KVSource,
        source_pages: Sequence[int],
        pages: Sequence[int],
        *,
        stamp: int,
        key: str,
        timeout_s: float,
    ) -> Future[TransferStats]:
        started = time.monotonic()

        def copy() -> TransferStats:
            check_pull(self._layout, self.num_pages, source, source_pages, pages)
            peer = self._peer(source, started + timeout_s)
            moved = peer.cache.data[:, :, list(source_pages)]
            self.cache.data[:, :, list(pages)] = moved
            if peer.stamp(source_pages) != stamp:
                raise TransferError(f"{source.name} released the pages of {key} meanwhile")
            peer.notify(key)
            return TransferStats(moved.nbytes, time.monotonic() - started)

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
        if self._agent not in self._peers:
            raise TransferError(f"{self.name} is closed")
        if source.agent not in self._peers or time.monotonic() > deadline:
            raise TransferError(f"{source.name} did not answer in time")
        return self._peers[source.agent]

    def _pulled(self, key: str) -> None:
        if key in self._expected:
            self._expected.remove(key)
            self._on_pulled(key)

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(work())
            except TransferError as error:
                future.set_exception(error)

        if not self._mailbox.put(run):
            future.set_exception(TransferError(f"{self.name} is closed"))
        return future

    def _run(self) -> None:
        while self._mailbox.work(None):
            pass
