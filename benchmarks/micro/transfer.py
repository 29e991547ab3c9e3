"""What handing a prefilled block over costs: `python -m benchmarks.micro.transfer`.

Two processes, one CPU thread each: one prefills a sequence of a random model, the other reads its KV
over NIXL and takes the first denoising step, as prefill and colocated worker do; a pipe stands in for
the router. Plain and overlapped transfers (`kv_transfer_overlap`) take turns in one run. Medians of:

- prefill: its forward, in ms. Overlap may slow it down: the peer reads while it computes.
- hand-over: from the end of the prefill's step until the reader may denoise.
- total: from the prefill's start until then.

Beside them the KV's size, and the rate at which a plain transfer moved it. UCX_TLS=tcp in the
environment measures the route between hosts; by default UCX reads the other process's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from backend.attention.kv_cache import KVCache
from backend.core.page_pool import PagePool
from backend.core.prefill_scheduler import PrefillScheduler, PrefillSchedulerConfig
from backend.core.request import Request, RequestStatus
from backend.core.sampling_params import SamplingParams
from backend.core.scheduler import Scheduler, SchedulerConfig
from backend.engine.async_engine import AsyncEngine
from backend.engine.block_stream import BlockUpdate
from backend.engine.engine import Engine
from backend.engine.model_runner import ModelRunner
from backend.models.config import ModelConfig
from backend.models.llada import Llada
from backend.transfer.base import KVSource, TransferStats
from backend.transfer.nixl import NixlTransfer

PAGE, CANVAS = 16, 128
PARAMS = SamplingParams(CANVAS, CANVAS, unmasking="quota", steps_per_block=32)


@dataclass(frozen=True)
class Shape:
    """Attributes:
    sequence: prompt + canvas, in tokens.
    """

    layers: int
    hidden: int
    sequence: int

    def engine(self, is_prefill: bool) -> Engine:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        heads = self.hidden // 64
        config = ModelConfig(
            architecture="llada", vocab_size=256, embedding_size=256, hidden_size=self.hidden,
            intermediate_size=3 * self.hidden, num_layers=self.layers, num_heads=heads, num_kv_heads=heads,
            max_position=8192, rms_norm_eps=1e-5, rope_theta=500000.0, mask_token_id=250, eos_token_ids=(251,),
        )  # fmt: skip
        pool = PagePool(-(-self.sequence // PAGE), PAGE)
        cache = KVCache(self.layers, pool.num_pages, PAGE, heads, 64, torch.float32, torch.device("cpu"))
        runner = ModelRunner(Llada(config).eval().requires_grad_(False), cache)
        if is_prefill:
            return Engine(runner, PrefillScheduler(PrefillSchedulerConfig(1), pool))
        return Engine(runner, Scheduler(SchedulerConfig(10**9, 8), pool))

    def request(self, name: str) -> Request:
        return Request(name, [1] * (self.sequence - CANVAS), PARAMS, 0.0)


@dataclass(frozen=True)
class Sample:
    """Seconds, see the module; and what a transfer moved."""

    prefill: float
    hand_over: float
    total: float
    num_bytes: int
    transfer: float


class Worker:
    """An engine with its end of the transfer."""

    def __init__(self, engine: Engine, name: str, overlap: bool) -> None:
        self.transfer = NixlTransfer(engine.runner.cache, name, "random", lambda key: self.engine.pulled(key))
        self.engine = AsyncEngine(engine, self.transfer, overlap)
        self.engine.start()

    async def stop(self) -> None:
        await self.engine.stop()
        self.transfer.close()


def serve_prefills(shape: Shape, overlap: bool, pipe: Connection) -> None:
    """The prefill worker's process: one prefill for each name that comes through the pipe, until there is none."""

    async def main() -> None:
        worker = Worker(shape.engine(True), "prefill", overlap)
        pipe.send(worker.transfer.source())
        while name := await asyncio.to_thread(pipe.recv):
            async for update in worker.engine.submit(shape.request(name)):
                pipe.send((update, time.monotonic()))
        await worker.stop()

    asyncio.run(main())


async def hand_over(worker: Worker, source: KVSource, shape: Shape, pipe: Connection, name: str) -> Sample:
    """One block through both processes."""
    started = time.monotonic()
    pipe.send(name)
    news = updates(pipe)
    update, told_at = await anext(news)
    held = update.held
    assert held is not None
    request = shape.request(name)
    stats: list[TransferStats] = []

    def pull(pages: Sequence[int]) -> Future[TransferStats]:
        assert held is not None
        future = worker.transfer.pull(
            source, held.pages, pages, stamp=held.stamp, key=name, timeout_s=120.0, by_layer=held.is_running
        )
        future.add_done_callback(lambda done: stats.append(done.result()))
        return future

    if held.is_running:
        request.status = RequestStatus.WAITING_FOR_KV
    else:
        request = Request(name, request.prompt, PARAMS, 0.0, prefilled=held.commits)
    stream = worker.engine.submit(request, pull)
    if held.is_running:
        update, told_at = await anext(news)
        assert update.held is not None
        worker.engine.prefilled(name, update.held.commits)
    async for there in stream:
        assert there.error is None, there.error
        ready = time.monotonic()
        break
    stream.abort()
    async for _ in news:
        pass
    prefill = update.seconds[1]
    return Sample(prefill, ready - told_at, ready - started, stats[0].num_bytes, stats[0].seconds)


async def updates(pipe: Connection) -> AsyncIterator[tuple[BlockUpdate, float]]:
    while True:
        update: tuple[BlockUpdate, float] = await asyncio.to_thread(pipe.recv)
        yield update
        if update[0].is_done:
            return


async def measure(shape: Shape, repeats: int) -> dict[bool, list[Sample]]:
    """Samples without and with overlap, in turn; the first of each warms up and is left out."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[bool, Connection] = {}
    processes: list[Any] = []
    for overlap in (False, True):
        pipes[overlap], theirs = context.Pipe()
        processes.append(context.Process(target=serve_prefills, args=(shape, overlap, theirs), daemon=True))
        processes[-1].start()
    sources = {overlap: await asyncio.to_thread(pipe.recv) for overlap, pipe in pipes.items()}
    worker = Worker(shape.engine(False), "reader", False)
    samples: dict[bool, list[Sample]] = {False: [], True: []}
    for i in range(repeats + 1):
        for overlap, pipe in pipes.items():
            sample = await hand_over(worker, sources[overlap], shape, pipe, f"{overlap}-{i}")
            while worker.engine.load.free_pages < worker.engine.load.num_pages:
                await asyncio.sleep(0.001)
            samples[overlap] += [sample] if i else []
    for pipe in pipes.values():
        pipe.send("")
    for process in processes:
        process.join()
    await worker.stop()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--sequence", type=int, nargs="+", default=[512, 1024, 2048], help="prompt + canvas")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    print(f"{'tokens':>6} {'KV MiB':>7} {'overlap':>8} {'prefill ms':>11} {'hand-over ms':>13} {'total ms':>9}   MiB/s")
    for sequence in args.sequence:
        samples = asyncio.run(measure(Shape(args.layers, args.hidden, sequence), args.repeats))
        for overlap, taken in samples.items():
            prefill, late, total, transfer = (
                1e3 * statistics.median(getattr(sample, name) for sample in taken)
                for name in ("prefill", "hand_over", "total", "transfer")
            )
            size = taken[0].num_bytes / 2**20
            rate = "" if overlap else f"{size / transfer * 1e3:.0f}"
            row = f"{sequence:>6} {size:>7.0f} {'yes' if overlap else 'no':>8} {prefill:>11.1f} {late:>13.1f}"
            print(f"{row} {total:>9.1f} {rate:>7}", flush=True)


if __name__ == "__main__":
    main()
