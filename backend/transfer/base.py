"""What moving KV pages from one worker to another means, whoever moves them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from backend.attention.kv_cache import KVCache


@dataclass(frozen=True)
class KVLayout:
    """How KV lies in a worker's pages: a page can only go where all of this is the same.

    Attributes:
        dtype: of an element, as torch names it: "bfloat16".
        model: fingerprint of the checkpoint: KV of other weights is as wrong as KV of another shape.
    """

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    model: str

    @classmethod
    def of(cls, cache: KVCache, model: str) -> KVLayout:
        num_layers, _, _, page_size, num_kv_heads, head_dim = cache.data.shape
        return cls(num_layers, page_size, num_kv_heads, head_dim, str(cache.data.dtype).removeprefix("torch."), model)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page's keys, or values, of one layer."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return self.page_size * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True)
class KVSource:
    """All that a peer needs to read a worker's pages. Good for one life of that worker.

    Attributes:
        name: the worker's name; may stay the same when it is started again.
        num_pages: pages that can be read; peers may differ in it.
        device: "cpu" or "cuda".
        device_index: which of the host's devices; 0 on a CPU.
        agent: how to reach the process; no two lives of a worker share it.
        pages_address: where `KVCache.data` begins.
        stamps_address: where the pages' stamps begin, int64 [num_pages] in host memory.
        progress_address: where the pages' progress begins, the same.
    """

    name: str
    layout: KVLayout
    num_pages: int
    device: str
    device_index: int
    agent: bytes
    pages_address: int
    stamps_address: int
    progress_address: int

    def to_wire(self) -> dict[str, Any]:
        """As MessagePack can carry it."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> KVSource:
        return cls(**{**wire, "layout": KVLayout(**wire["layout"])})


@dataclass(frozen=True)
class TransferStats:
    """Attributes:
    num_bytes: of keys and values.
    seconds: from the call of `pull` until the data was here and known to be good.
    """

    num_bytes: int
    seconds: float


class TransferError(RuntimeError):
    """The pages did not arrive. A new prefill elsewhere may succeed."""


class LayoutMismatchError(TransferError):
    """The two workers keep KV differently, so no page can go from one to the other."""


class KVTransfer(Protocol):
    """Moves KV pages between workers. All methods may be called from any thread and none waits
    for a peer; `close` waits for what is in flight, shortly.
    """

    name: str

    def source(self) -> KVSource:
        """What peers need to read this worker's pages."""
        ...

    def stamp(self, pages: Sequence[int]) -> int:
        """What tells these pages' present content from any later one. They are allocated and released together."""
        ...

    def invalidate(self, pages: Sequence[int]) -> None:
        """Makes every pull that has not read all of these pages yet fail. Call it before they are given to another."""
        ...

    def begin(self, pages: Sequence[int]) -> None:
        """A prefill of these pages may be pulled `by_layer`. Call it before anybody hears of their stamp."""
        ...

    def set_progress(self, pages: Sequence[int], num_layers: int) -> None:
        """That many layers of these pages are complete, in memory that peers read.

        On a GPU: when it has done what the current stream of this thread holds by now.
        """
        ...

    def expect(self, key: str) -> None:
        """`key` waits to be pulled from here: from now on `on_pulled(key)` may be called, once.

        A key stands for one sequence's pages at one time and is never used again.
        """
        ...

    def forget(self, key: str) -> None:
        """`on_pulled(key)` is not wanted any more. One call may still be under way."""
        ...

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
        """Copies `source_pages` of a peer into `pages` of this worker, one to one, and tells the peer.

        The future resolves when nothing is written to `pages` any more, whether it went well or not:
        only then may they be freed. On a GPU, nothing is written to them before it has done what the current
        stream of this thread holds by now, and kernels that are launched afterwards see what was written. It
        cannot be cancelled. After `timeout_s` it asks for nothing more, and fails half a second later at the
        latest, unless the peer still sends what was asked for.

        Args:
            stamp: what the peer's `stamp` said of `source_pages`.
            key: what the peer expects to be pulled.
            timeout_s: of everything, from the connection to the last byte and, by layer, the prefill.
            by_layer: the peer's prefill may still run (see `begin`): each layer is read when it is complete.

        Raises (from the future):
            LayoutMismatchError: nothing was read.
            TransferError: anything else; `pages` then hold nothing of use.
        """
        ...

    def connect(self, source: KVSource, *, timeout_s: float) -> Future[None]:
        """Spends what the first pull from a peer costs more than the others.

        Raises (from the future):
            LayoutMismatchError: no pull can succeed.
            TransferError: the peer cannot be reached. A pull may still be tried.
        """
        ...

    def drop_peer(self, name: str) -> None:
        """That worker is gone: pulls from it fail and what is kept for it is let go. It may come back."""
        ...

    def close(self) -> None:
        """Fails what is under way and ends the threads. Peers cannot read from here afterwards. Idempotent."""
        ...


def check_layout(layout: KVLayout, source: KVSource) -> None:
    """Raises LayoutMismatchError unless a worker that keeps KV as `layout` can take the source's pages."""
    if source.layout != layout:
        raise LayoutMismatchError(f"{source.name} keeps KV as {source.layout}, this worker as {layout}")


def check_pages(num_pages: int, source: KVSource, source_pages: Sequence[int], pages: Sequence[int]) -> None:
    """Raises TransferError unless `source_pages` exist and `pages`, of a pool of `num_pages`, can take them."""
    if not pages or len(pages) != len(source_pages):
        raise TransferError(f"{len(source_pages)} pages of {source.name} cannot go into {len(pages)}")
    for of, indices, limit in ((source.name, source_pages, source.num_pages), ("this worker", pages, num_pages)):
        if min(indices) < 0 or max(indices) >= limit:
            raise TransferError(f"{of} has pages 0 to {limit - 1}, not {min(indices)} to {max(indices)}")
