"""What a worker keeps of one peer that it reads KV from."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend.attention.fence import Fence
from backend.transfer.base import KVLayout, KVSource, TransferError, TransferStats
from backend.transfer.nixl_agent import Memory, NixlAgent

# A pull of any length lets others in, and can stop, after this much.
_BATCH_BYTES = 16 * 2**20
# Asked of one peer at once: enough to hide the turnaround, and soon over when a pull gives up.
_WINDOW_BYTES = 2 * _BATCH_BYTES
# A peer that owes something to a pull that has failed, and has sent nothing for so long, does not answer any more.
_GRACE_S = 0.4
# How late a layer may be seen to be complete.
_PROGRESS_INTERVAL_S = 1e-3
# For a notification, which nobody waits for.
_NOTIFY_S = 5.0

Script = Generator[None, None, None]


class PagedMemory:
    """A worker's KV pages, ours or a peer's: one piece per layer, keys or values, and page, in this order."""

    def __init__(self, layout: KVLayout, num_pages: int, address: int, device: str, device_index: int) -> None:
        self.num_pages = num_pages
        plane_bytes = (num_pages + 1) * layout.page_bytes  # with the scratch page, which is no piece
        num_planes = 2 * layout.num_layers
        self.memory = Memory(address, num_planes * plane_bytes, device, device_index)
        planes = address + np.arange(num_planes, dtype=np.uint64) * np.uint64(plane_bytes)
        pages = np.arange(num_pages, dtype=np.uint64) * np.uint64(layout.page_bytes)
        self.addresses: NDArray[np.uint64] = (planes[:, None] + pages).ravel()

    def pieces(self, pages: Sequence[int], layers: range) -> NDArray[np.int32]:
        """Indices of the pieces of `pages` in `layers`, int32 [2 * layers * pages]."""
        planes = np.arange(2 * layers.start, 2 * layers.stop, dtype=np.int32)
        return (planes[:, None] * np.int32(self.num_pages) + np.array(pages, dtype=np.int32)).ravel()


class Link:
    """Reads from one peer, through an agent of its own.

    An agent per peer, because what hangs can only be stopped by destroying the agent it hangs in
    (`NixlAgent.close`): so it takes nobody else's reads with it. It costs 0.1 s, and the memory is
    registered once per peer.
    """

    def __init__(self, name: str, source: KVSource, own: PagedMemory) -> None:
        self.source = source
        self.jobs: list[Job] = []
        self.num_bytes_under_way = 0
        self.arrived_at = 0.0
        """When anything last did, by time.monotonic()."""
        self.own = own
        self.peers = PagedMemory(
            source.layout, source.num_pages, source.pages_address, source.device, source.device_index
        )
        # A word of the peer's arrives in the place of the pull's first page, which no other pull has;
        # what comes along with a notification, in the last place, where nobody looks.
        self.landing = np.zeros(own.num_pages + 1, dtype=np.int64)
        self.agent = NixlAgent(f"{name} reading {source.name}", serves=False)
        try:
            peer = self.agent.add_peer(source.agent)
            page_bytes = source.layout.page_bytes
            for memory in (own.memory, Memory.of(self.landing)):
                self.agent.register(memory)
            self.own_pages = self.agent.prepare(None, own.memory, own.addresses, page_bytes)
            self.peers_pages = self.agent.prepare(peer, self.peers.memory, self.peers.addresses, page_bytes)
            self.own_words = self._prepare_words(None, Memory.of(self.landing))
            self.peers_stamps = self._prepare_words(peer, Memory(source.stamps_address, 8 * source.num_pages))
            self.peers_progress = self._prepare_words(peer, Memory(source.progress_address, 8 * source.num_pages))
        except BaseException:
            self.agent.close()
            raise

    def _prepare_words(self, peer: str | None, memory: Memory) -> int:
        addresses = np.arange(memory.address, memory.address + memory.num_bytes, 8, dtype=np.uint64)
        return self.agent.prepare(peer, memory, addresses, 8)

    def step(self, now: float) -> bool:
        """Lets every job go on. False: none could.

        Raises:
            TransferError: the peer does not answer.
            Exception: the connection is broken, says NIXL.
        """
        moved = False
        for job in list(self.jobs):
            moved |= job.step(now)
            if job.is_over:
                self.jobs.remove(job)
        return moved

    def stop(self, reason: str) -> None:
        """Its jobs fail as soon as what is under way has arrived."""
        for job in self.jobs:
            job.give_up(TransferError(reason), time.monotonic())

    def fail(self, reason: str) -> None:
        """Its jobs fail now. Only when nothing can be written to their pages any more."""
        for job in self.jobs:
            job.fail(TransferError(reason))
        self.jobs.clear()


class Job:
    """Reads of one link that belong together and have one deadline and one outcome.

    `_script` says what to do, and yields whenever others may go on; it has resolved `future` when it
    returns.
    """

    def __init__(self, link: Link, future: Future[Any], deadline: float) -> None:
        self.link = link
        self.future = future
        self.deadline = deadline
        self.is_over = False
        self._under_way: deque[tuple[int, int]] = deque()  # (read, its bytes)
        self._moved = False
        self._error: TransferError | None = None
        self._script_run = self._script()

    def step(self, now: float) -> bool:
        """Goes on as far as it can. False: it could not.

        Raises:
            Exception: see `Link.step`.
        """
        self._moved = False
        self._collect(now)
        if self._error is None and now > self.deadline:
            self.give_up(TransferError(f"{self.link.source.name} did not answer in time"), now)
        if self._error is None:
            try:
                next(self._script_run)
            except StopIteration:
                self.is_over = True
            except TransferError as error:
                self.give_up(error, now)
        if self._error is not None:
            if not self._under_way:
                self.fail(self._error)
            elif now > max(self.deadline, self.link.arrived_at) + _GRACE_S:
                raise self._error
        return self._moved or self.is_over

    def give_up(self, error: TransferError, now: float) -> None:
        """Begins nothing more and fails when what is under way has arrived."""
        self._error = self._error or error
        self.deadline = min(self.deadline, now)
        self._script_run.close()

    def fail(self, error: TransferError) -> None:
        """Nothing is under way."""
        self.is_over = True
        if not self.future.done():
            self.future.set_exception(error)

    def _script(self) -> Script:
        raise NotImplementedError

    def _begin(self, read: int, num_bytes: int) -> None:
        self._under_way.append((read, num_bytes))
        self.link.num_bytes_under_way += num_bytes
        self._moved = True

    def _collect(self, now: float) -> None:
        while self._under_way and self.link.agent.is_done(self._under_way[0][0]):
            self.link.num_bytes_under_way -= self._under_way.popleft()[1]
            self.link.arrived_at = now
            self._moved = True

    def _all_arrived(self) -> Script:
        while self._under_way:
            yield

    def _word(self, words: int, index: int, place: int, notification: bytes = b"") -> Generator[None, None, int]:
        """Reads one int64 of the peer's into a place of `landing`."""
        link = self.link
        into, of = np.array([place], dtype=np.int32), np.array([index], dtype=np.int32)
        self._begin(link.agent.read(link.own_words, into, words, of, notification), 8)
        yield from self._all_arrived()
        return int(link.landing[place])

    def _notify(self, message: bytes) -> Script:
        """Not by a notification alone: NIXL does not say when one has left, and it leaves while we look at a read."""
        yield from self._word(self.link.peers_stamps, 0, self.link.own.num_pages, message)


class Greeting(Job):
    """Makes UCX connect for reads and for notifications."""

    def _script(self) -> Script:
        yield from self._notify(b"")
        self.future.set_result(None)


@dataclass(frozen=True)
class Wanted:
    """What to pull: the arguments of `KVTransfer.pull`, and when it was called.

    Attributes:
        is_free: passed when nobody else writes to `pages` any more.
    """

    source_pages: Sequence[int]
    pages: Sequence[int]
    stamp: int
    key: str
    by_layer: bool
    started: float
    is_free: Fence


class Pull(Job):
    """See `KVTransfer.pull`."""

    def __init__(self, link: Link, future: Future[TransferStats], deadline: float, wanted: Wanted) -> None:
        super().__init__(link, future, deadline)
        self._wanted = wanted

    def _script(self) -> Script:
        link, wanted = self.link, self._wanted
        layout = link.source.layout
        while not wanted.is_free.is_passed:
            yield
        yield from self._read_as_they_come() if wanted.by_layer else self._read(range(layout.num_layers))
        yield from self._all_arrived()
        # Only now: a stamp that is read before the last byte says nothing about that byte.
        if (yield from self._first_pages(link.peers_stamps)) != wanted.stamp:
            raise self._released()
        num_bytes = 2 * layout.num_layers * len(wanted.pages) * layout.page_bytes
        now = time.monotonic()
        self.future.set_result(TransferStats(num_bytes, now - wanted.started))
        self.deadline = now + _NOTIFY_S
        yield from self._notify(wanted.key.encode())

    def _first_pages(self, words: int) -> Generator[None, None, int]:
        """A word of the peer's about the sequence."""
        return (yield from self._word(words, self._wanted.source_pages[0], self._wanted.pages[0]))

    def _released(self) -> TransferError:
        return TransferError(f"{self.link.source.name} released the pages of {self._wanted.key} meanwhile")

    def _read_as_they_come(self) -> Script:
        num_read = 0
        while num_read < self.link.source.layout.num_layers:
            num_complete = yield from self._first_pages(self.link.peers_progress)
            if not num_read <= num_complete <= self.link.source.layout.num_layers:
                raise self._released()
            yield from self._read(range(num_read, num_complete))
            if num_read == num_complete:
                yield from self._wait(_PROGRESS_INTERVAL_S)
            num_read = num_complete

    def _wait(self, seconds: float) -> Script:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            yield

    def _read(self, layers: range) -> Script:
        link = self.link
        into, of = link.own.pieces(self._wanted.pages, layers), link.peers.pieces(self._wanted.source_pages, layers)
        page_bytes = link.source.layout.page_bytes
        step = max(1, _BATCH_BYTES // page_bytes)
        for first in range(0, len(into), step):
            while link.num_bytes_under_way >= _WINDOW_BYTES:
                yield
            batch = slice(first, first + step)
            read = link.agent.read(link.own_pages, into[batch], link.peers_pages, of[batch])
            self._begin(read, len(into[batch]) * page_bytes)
            yield
