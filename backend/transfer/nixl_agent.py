"""One NIXL agent over UCX: the few calls a transfer needs, and what they really do."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_raise_exceptions = logging.raiseExceptions
# The build has to fit the process's CUDA runtime, which is torch's. Without CUDA either works.
_nixl: Any = import_module(f"nixl_cu{12 if (torch.version.cuda or '').startswith('12.') else 13}._bindings")
logging.raiseExceptions = _raise_exceptions  # NIXL turns it off for the whole process

_WAKE_UP_US = 10_000
_RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Memory:
    """A piece of memory that NIXL reads from or into: `num_bytes` from `address` on a device."""

    address: int
    num_bytes: int
    device: str = "cpu"
    device_index: int = 0

    @classmethod
    def of(cls, array: NDArray[np.int64]) -> Memory:
        return cls(array.ctypes.data, array.nbytes)

    @property
    def segment(self) -> Any:
        return _nixl.DRAM_SEG if self.device == "cpu" else _nixl.VRAM_SEG


class NixlAgent:
    """Owned by one thread: NIXL locks nothing. Any call may raise NIXL's exceptions, which have no common base.

    NIXL's own Python class is not used because it lets the progress thread of an agent spin: a whole
    core, for ever. Given a delay, that thread sleeps until UCX has something for it.

    Args:
        serves: whether peers read from it. It then answers in a thread of its own, without Python:
            over TCP, UCX reads by asking the other side. An agent that only reads is twice as fast
            without that thread, and UCX's callbacks then run in `is_done` alone instead of racing
            with the calls that they break (a peer that comes back can crash such a process).
    """

    def __init__(self, name: str, *, serves: bool) -> None:
        self.serves = serves
        self._is_host_memory = True
        config = _nixl.nixlAgentConfig()
        config.useProgThread = serves
        config.pthrDelay = _WAKE_UP_US
        self._agent = _nixl.nixlAgent(name, config)
        self._agent.createBackend("UCX", {})
        self._unreleased: set[int] = set()

    def register(self, memory: Memory) -> None:
        """It must outlive the agent."""
        self._is_host_memory &= memory.device == "cpu"
        region = [(memory.address, memory.num_bytes, memory.device_index, "")]
        self._agent.registerMem(_nixl.nixlRegDList(memory.segment, region))

    def metadata(self) -> bytes:
        """What peers need to reach all that is registered."""
        metadata: bytes = self._agent.getLocalMD()
        return metadata

    def add_peer(self, metadata: bytes) -> str:
        """The name of a peer to read from. Does not wait for it."""
        name: bytes = self._agent.loadRemoteMD(metadata)
        return name.decode()

    def prepare(self, peer: str | None, memory: Memory, addresses: NDArray[np.uint64], num_bytes: int) -> int:
        """Makes pieces of `num_bytes` at `addresses` [N] in `memory`, a peer's or our own, known by their index."""
        rows = np.empty((len(addresses), 3), dtype=np.uint64)
        rows[:, 0] = addresses
        rows[:, 1] = num_bytes
        rows[:, 2] = memory.device_index
        pieces = _nixl.nixlXferDList(memory.segment, rows)
        handle: int = self._agent.prepXferDlist(pieces) if peer is None else self._agent.prepXferDlist(peer, pieces)
        return handle

    def read(
        self, own: int, into: NDArray[np.int32], peers: int, of: NDArray[np.int32], notification: bytes = b""
    ) -> int:
        """Begins to read pieces `of` [N] of a peer's list into pieces `into` [N] of an own list.

        Between processes that share a kernel this copies at once. The peer gets the notification when
        all is read.
        """
        handle: int = self._agent.makeXferReq(_nixl.NIXL_READ, own, into, peers, of)
        self._unreleased.add(handle)
        self._agent.postXferReq(handle, notification)
        return handle

    def is_done(self, handle: int) -> bool:
        """Lets what has arrived move on. True once, and the read is forgotten."""
        if self._agent.getXferStatus(handle) == _nixl.NIXL_IN_PROG:
            return False
        self._release(handle)
        return True

    def notifications(self) -> Iterator[bytes]:
        for messages in self._agent.getNotifs({}).values():
            yield from messages

    def close(self) -> None:
        """Afterwards nothing is written to registered memory any more.

        This is the only way to be sure. Releasing the handle of a read that is under way succeeds, and
        so does removing the peer, but neither stops it: over TCP, every byte still arrives when the
        peer answers at last (NIXL 1.4.1, UCX 1.22). Only destroying the agent closes its connections.

        It has a price, over TCP: UCX aborts a process that is answering a read when the reader's
        connection breaks. So let a peer that still answers finish first, or wait with closing (`is_silent`).
        """
        for handle in list(self._unreleased):
            self._release(handle)
        self._agent = None
        if not self._is_host_memory:
            torch.cuda.synchronize()  # copies that the GPU has been told to make

    @property
    def is_silent(self) -> bool:
        """Whether nothing is written to registered memory but in calls of this agent: by no NIC and no GPU.

        Then it is enough to call nothing but `close`, once the peer is gone or does not matter.
        """
        return not self.serves and self._is_host_memory and not any(_RDMA_DEVICES.glob("*"))

    def _release(self, handle: int) -> None:
        self._unreleased.discard(handle)
        self._agent.releaseXferReq(handle)
