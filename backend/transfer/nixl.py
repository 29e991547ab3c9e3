"""KV transfer between processes and hosts, by NIXL reads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from backend.attention.kv_cache import KVCache
from backend.transfer.base import KVLayout, KVSource, TransferError, TransferStats, check_layout, check_pages
from backend.transfer.nixl_agent import Memory, NixlAgent
from backend.transfer.nixl_link import Greeting, Job, Link, PagedMemory, Pull, Wanted
from backend.transfer.offering import Offering

log = logging.getLogger(__name__)

# How long to sleep while reads are under way and none moves: from the first to the second, doubling.
_SHORTEST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 500e-6
# How late the source may hear that its pages are free.
_NOTIFICATION_INTERVAL_S = 2e-3


class NixlTransfer(Offering):
    """A `KVTransfer`. One thread owns all NIXL agents: one that peers read from, and one per peer (`Link`).

    Args:
        name: of this worker, among its peers.
        model: fingerprint of the checkpoint.
        on_pulled: called with a key that was expected and has been pulled, in the transfer's thread.
    """

    def __init__(self, cache: KVCache, name: str, model: str, on_pulled: Callable[[str], None]) -> None:
        self.name = name
        self._cache = cache  # its memory has to outlive the agents
        data = cache.data
        device, device_index = data.device.type, data.device.index or 0
        if data.is_cuda:
            _enter(data.device)
        num_pages = data.shape[2] - 1
        self._layout = KVLayout.of(cache, model)
        self._pages = PagedMemory(self._layout, num_pages, data.data_ptr(), device, device_index)
        super().__init__(num_pages, data.device, on_pulled)
        stamps, progress = Memory.of(self.stamps.stamps), Memory.of(self.stamps.progress)
        self._agent = NixlAgent(name, serves=True)
        for memory in (self._pages.memory, stamps, progress):
            self._agent.register(memory)
        self._source = KVSource(
            name,
            self._layout,
            num_pages,
            device,
            device_index,
            self._agent.metadata(),
            data.data_ptr(),
            stamps.address,
            progress.address,
        )
        self._links: dict[bytes, Link] = {}
        self._closing: list[Link] = []
        self._abandoned: list[Link] = []
        self._next_look = 0.0
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def source(self) -> KVSource:
        return self._source

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
        # Whoever had these pages before may still be written to: by a step that was launched when it ended.
        wanted = Wanted(tuple(source_pages), tuple(pages), stamp, key, by_layer, started, self._fence())

        def new_job(link: Link, future: Future[TransferStats]) -> Job:
            check_pages(self._pages.num_pages, source, wanted.source_pages, wanted.pages)
            return Pull(link, future, started + timeout_s, wanted)

        return self._submit(source, new_job)

    def connect(self, source: KVSource, *, timeout_s: float) -> Future[None]:
        deadline = time.monotonic() + timeout_s
        return self._submit(source, lambda link, future: Greeting(link, future, deadline))

    def drop_peer(self, name: str) -> None:
        self._mailbox.put(lambda: self._drop_peer(name))

    def close(self) -> None:
        self._mailbox.close()
        self._thread.join()

    def _submit(self, source: KVSource, new_job: Callable[[Link, Future[Any]], Job]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        if not self._mailbox.put(lambda: self._begin(source, future, new_job)):
            future.set_exception(TransferError(f"{self.name} is closed"))
        return future

    # What follows runs in the transfer's thread.

    def _run(self) -> None:
        if self._cache.data.is_cuda:
            _enter(self._cache.data.device)
        try:
            pause = _SHORTEST_PAUSE_S
            while self._mailbox.work(self._patience(pause)):
                pause = _SHORTEST_PAUSE_S if self._step() else min(2 * pause, _LONGEST_PAUSE_S)
            for link in list(self._links.values()):
                self._stop(link, f"{self.name} is closed")
            while self._closing:
                self._step()
                time.sleep(_LONGEST_PAUSE_S)
        finally:
            self._mailbox.close()
            for link in (*self._links.values(), *self._closing, *self._abandoned):
                link.agent.close()
                link.fail(f"{self.name} has failed")
            self._agent.close()

    def _patience(self, pause: float) -> float | None:
        """How long nothing can happen but a command; None if that is for ever."""
        if self._layers_under_way or self._closing or any(link.jobs for link in self._links.values()):
            return pause
        return _NOTIFICATION_INTERVAL_S if self._expected else None

    def _step(self) -> bool:
        """Lets everything go on. False: nothing could."""
        now = time.monotonic()
        moved = self._publish_layers()
        if self._expected and now >= self._next_look:
            self._next_look = now + _NOTIFICATION_INTERVAL_S
            self._look_for_notifications()
        for link in (*self._links.values(), *self._closing):
            try:
                moved |= link.step(now)
            except Exception as error:
                self._break(link, error)
        for link in [link for link in self._closing if not link.jobs]:
            self._closing.remove(link)
            link.agent.close()
        return moved

    def _look_for_notifications(self) -> None:
        for message in self._agent.notifications():
            self._pulled(message.decode())

    def _begin(self, source: KVSource, future: Future[Any], new_job: Callable[[Link, Future[Any]], Job]) -> None:
        try:
            check_layout(self._layout, source)
            link = self._links.get(source.agent) or self._new_link(source)
            link.jobs.append(new_job(link, future))
        except TransferError as error:
            future.set_exception(error)
        except Exception as error:  # NIXL's have no common base
            future.set_exception(TransferError(f"{source.name} cannot be reached: {_say(error)}"))

    def _new_link(self, source: KVSource) -> Link:
        for link in list(self._links.values()):
            if link.source.name == source.name and not link.jobs:  # of a former life, most likely
                self._stop(link, "")
        link = self._links[source.agent] = Link(self.name, source, self._pages)
        return link

    def _drop_peer(self, name: str) -> None:
        for link in list(self._links.values()):
            if link.source.name == name:
                self._stop(link, f"{name} is gone")
        for link in [link for link in self._abandoned if link.source.name == name]:
            self._abandoned.remove(link)
            link.agent.close()

    def _stop(self, link: Link, reason: str) -> None:
        self._closing.append(self._links.pop(link.source.agent))
        link.stop(reason)

    def _break(self, link: Link, error: Exception) -> None:
        """Fails what is under way. The peer may be pulled from again, through a new link."""
        is_given_up = link in self._closing
        if is_given_up:
            self._closing.remove(link)
        else:
            del self._links[link.source.agent]
        if isinstance(error, TransferError) and link.agent.is_silent and not is_given_up:
            self._abandoned.append(link)  # it may go on one day, and closing would make UCX abort it
        else:
            link.agent.close()
        link.fail(f"{link.source.name}: {_say(error)}")


def _enter(device: torch.device) -> None:
    """Makes the device's context this thread's: UCX asks the driver, which makes none by itself."""
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)


def _say(error: Exception) -> str:
    return str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
