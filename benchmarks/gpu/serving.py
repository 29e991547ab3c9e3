"""One engine under an open-loop load: latency by arrival, against one request at a time.

The weights are random, so how many forwards a block takes comes from the same model of denoising as in the
simulator; everything else is the live engine: scheduler, sampler, pages.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from backend.core.request import Request
from backend.engine.engine import Engine
from backend.models.config import ModelConfig
from benchmarks.arrivals import poisson
from benchmarks.gpu.engines import BLOCK_LENGTH, request
from benchmarks.lengths import TRACES, Length, generate
from benchmarks.simulator.denoising import Lognormal


@dataclass(frozen=True)
class Job:
    """One request of the load.

    Attributes:
        steps: forwards of each of its blocks, prefill included.
    """

    index: int
    arrival: float
    length: Length
    canvas_length: int
    steps: Sequence[int]


def jobs(trace: str, rate: float, count: int, mean_steps: float, seed: int, scale: float = 1.0) -> list[Job]:
    """A Poisson load of `count` requests of one of the paper's traces; lengths times `scale`."""
    canvas = max(round(TRACES[trace].canvas_length * scale) // BLOCK_LENGTH, 1) * BLOCK_LENGTH
    lengths = (length.scaled(scale) for length in generate(TRACES[trace], seed))
    denoising = Lognormal(mean_steps)
    made = []
    for i, (arrival, length) in enumerate(itertools.islice(zip(poisson(rate, seed), lengths, strict=False), count)):
        num_blocks = -(-min(length.num_output_tokens, canvas) // BLOCK_LENGTH)
        made.append(Job(i, arrival, length, canvas, denoising.draw(seed, i, num_blocks, BLOCK_LENGTH)))
    return made


@dataclass(frozen=True)
class Served:
    """Attributes:
    latencies: seconds from each request's arrival to the end of its last block.
    num_steps, seconds: of the engine, from the first arrival to the last end.
    """

    latencies: Sequence[float]
    num_steps: int
    seconds: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.latencies)


def serve(engine: Engine, load: Sequence[Job]) -> Served:
    """Runs the load in real time."""
    config = engine.runner.model.config
    waiting = list(reversed(load))
    at_block: dict[str, tuple[Job, int]] = {}
    latencies = []
    num_steps = 0
    started = time.perf_counter()
    while waiting or at_block:
        now = time.perf_counter() - started
        while waiting and waiting[-1].arrival <= now:
            job = waiting.pop()
            _dispatch(engine, config, job, 0, at_block)
        output = engine.step(now=now)
        if output is None:
            if not waiting:
                raise RuntimeError(f"nothing runs, and {', '.join(at_block)} wait")
            time.sleep(max(waiting[-1].arrival - (time.perf_counter() - started), 0.0))
            continue
        num_steps += 1
        for ended in output.left:
            job, block = at_block.pop(ended.request_id)
            if ended.error is not None:
                raise RuntimeError(f"{ended.request_id}: {ended.error}")
            if block + 1 < len(job.steps):
                _dispatch(engine, config, job, block + 1, at_block)
            else:
                latencies.append(time.perf_counter() - started - job.arrival)
    return Served(latencies, num_steps, time.perf_counter() - started)


def _dispatch(engine: Engine, config: ModelConfig, job: Job, block: int, at_block: dict[str, tuple[Job, int]]) -> None:
    of: Request = request(
        f"{job.index}/{block}",
        config,
        job.length.num_prompt_tokens,
        job.canvas_length,
        job.steps[block],
        arrival=job.arrival,
        finished_blocks=[1] * (block * BLOCK_LENGTH),
    )
    at_block[of.request_id] = (job, block)
    engine.scheduler.add(of)


def queued(load: Sequence[Job], service_s: Sequence[float]) -> list[float]:
    """Latencies of the same arrivals if requests are served one after the other, each in `service_s` (Lindley)."""
    free_at, latencies = 0.0, []
    for job, seconds in zip(load, service_s, strict=True):
        free_at = max(free_at, job.arrival) + seconds
        latencies.append(free_at - job.arrival)
    return latencies


def rate_at_latency(load: Sequence[Job], service_s: Sequence[float], mean_s: float) -> float:
    """Requests/s at which these requests, one after the other, have that mean latency: by stretching their arrivals.

    0 if they have it at no load, so slow is the service alone.
    """
    base = len(load) / load[-1].arrival
    if statistics.fmean(service_s) >= mean_s:
        return 0.0
    low, high = 1e-6, 1e6
    for _ in range(80):
        stretch = (low * high) ** 0.5
        stretched = [Job(j.index, j.arrival * stretch, j.length, j.canvas_length, j.steps) for j in load]
        if statistics.fmean(queued(stretched, service_s)) > mean_s:
            low = stretch
        else:
            high = stretch
    return base / high
