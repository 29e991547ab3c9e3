"""The two sides of a transfer. The one that is read from also runs in a process of its own (see the last lines)."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend.attention.kv_cache import KVCache
from backend.transfer.base import KVSource, KVTransfer
from backend.transfer.nixl import NixlTransfer

NUM_LAYERS = 4
NUM_PAGES = 96
MODEL = "a checkpoint"


def new_cache(num_pages: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> KVCache:
    return KVCache(NUM_LAYERS, num_pages, 16, 2, 64, dtype, torch.device(device))


def content(seed: int, num_pages: int) -> list[Tensor]:
    """What pages filled with `seed` hold, each [layers, 2, page_size, K, E]."""
    shape = (num_pages, NUM_LAYERS, 2, 16, 2, 64)
    return list(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Puller:
    """The worker that reads. Its pages hold zeros wherever nothing was read into them."""

    def __init__(
        self,
        new_transfer: Callable[[KVCache, str, Callable[[str], None]], KVTransfer],
        model: str = MODEL,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.cache = new_cache(64, dtype, device)
        self.transfer = new_transfer(self.cache, model, lambda key: None)

    def check(self, read: dict[int, Tensor]) -> None:
        """These pages hold this [layers, 2, page_size, K, E], and all others nothing."""
        expected = torch.zeros_like(self.cache.data)
        for page, tensor in read.items():
            expected[:, :, page] = tensor
        assert torch.equal(self.cache.data, expected)


class Owner:
    """The worker that is read from."""

    def __init__(
        self, new_transfer: Callable[[KVCache, Callable[[str], None]], KVTransfer], device: str = "cpu"
    ) -> None:
        self.cache = new_cache(NUM_PAGES, device=device)
        self.num_pulled: dict[str, int] = {}
        self.transfer = new_transfer(self.cache, self._count)

    def source(self) -> KVSource:
        return self.transfer.source()

    def prefill(self, key: str, pages: Sequence[int], seed: int) -> int:
        """Fills the pages, expects them to be pulled and says their stamp."""
        for page, tensor in zip(pages, content(seed, len(pages)), strict=True):
            self.cache.data[:, :, page] = tensor
        if self.cache.data.is_cuda:
            torch.cuda.synchronize()  # as after a step
        self.transfer.expect(key)
        return self.transfer.stamp(pages)

    def begin(self, key: str, pages: Sequence[int]) -> int:
        """Like `prefill`, but nothing is complete yet."""
        self.transfer.begin(pages)
        self.transfer.expect(key)
        return self.transfer.stamp(pages)

    def prefill_layer(self, pages: Sequence[int], layer: int, seed: int) -> None:
        for page, tensor in zip(pages, content(seed, len(pages)), strict=True):
            self.cache.data[layer, :, page] = tensor[layer]
        self.transfer.set_progress(pages, layer + 1)

    def launch_layers(self, pages: Sequence[int], seed: int, cycles: int) -> float:
        """Tells a GPU to fill layer after layer, so many clock cycles each, and returns at once: seconds that took."""
        filled = torch.stack(content(seed, len(pages)), dim=2).to("cuda")
        index = torch.tensor(pages, device="cuda")
        torch.cuda.synchronize()
        started = time.monotonic()
        for layer in range(NUM_LAYERS):
            torch.cuda._sleep(cycles)
            self.cache.data[layer].index_copy_(1, index, filled[layer])
            self.transfer.set_progress(pages, layer + 1)
        return time.monotonic() - started

    def forget(self, key: str) -> None:
        self.transfer.forget(key)

    def release(self, pages: Sequence[int], after_s: float = 0.0) -> None:
        """Gives the pages to somebody else, who fills them."""

        def run() -> None:
            time.sleep(after_s)
            self.transfer.invalidate(pages)
            self.cache.data[:, :, list(pages)] = -1.0

        if after_s == 0.0:
            run()
        else:
            threading.Thread(target=run).start()

    def is_released(self, pages: Sequence[int], stamp: int) -> bool:
        """Whether `release` is through with pages whose stamp was `stamp`."""
        return self.transfer.stamp(pages) != stamp and bool((self.cache.data[:, :, pages[-1]] == -1.0).all())

    def pulled(self, key: str) -> int:
        return self.num_pulled.get(key, 0)

    def close(self) -> None:
        self.transfer.close()

    def _count(self, key: str) -> None:
        self.num_pulled[key] = self.pulled(key) + 1


class RemoteOwner:
    """An `Owner` whose methods run in a process of its own.

    Args:
        transports: those that UCX may use; all by default.
    """

    def __init__(self, name: str, transports: str | None = None, device: str = "cpu") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.backend.transfer.workers", name, device],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "OMP_NUM_THREADS": "1"} | ({"UCX_TLS": transports} if transports else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.is_stopped = False

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            assert self._process.stdin is not None and self._process.stdout is not None
            pickle.dump((method, args), self._process.stdin)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)

        return call

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        self.is_stopped = True

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self.is_stopped = False

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def _serve(name: str, device: str) -> None:
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    owner = Owner(lambda cache, on_pulled: NixlTransfer(cache, name, MODEL, on_pulled), device)
    while True:
        try:
            method, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(getattr(owner, method)(*args), answers)
        answers.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    _serve(*sys.argv[1:])
