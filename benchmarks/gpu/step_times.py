"""How long steps take: decodes alone by batch size, one prefill alone by length."""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from backend.core.scheduler import Scheduler
from backend.engine.engine import Engine, StepOutput
from benchmarks.gpu.engines import BLOCK_LENGTH, clear, request, synchronize

COLUMNS = ("num_decodes", "mean_context", "prefill_tokens", "seconds")
"""As `benchmarks.simulator.latency.Measured` reads them."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, from its launch to its commits being known or, of many in a row, from step to step."""

    num_decodes: int
    context: int
    prefill_tokens: int
    seconds: float


def decode_time(engine: Engine, batch: int, context: int, num_steps: int = 16) -> StepTime:
    """Of `batch` blocks over `context` tokens each, prompt and canvas together: the mean of steps in a row."""
    config, scheduler = engine.runner.model.config, engine.scheduler
    assert isinstance(scheduler, Scheduler)
    requests = [
        request(f"decode-{i}", config, context - BLOCK_LENGTH, BLOCK_LENGTH, BLOCK_LENGTH, arrival=float(i))
        for i in range(batch)
    ]
    for of in requests:
        scheduler.add(of)
    try:
        while scheduler.num_waiting or scheduler.num_denoising < batch:
            _step(engine)
        _step(engine)
        started = time.perf_counter()
        for _ in range(num_steps):
            assert len(_step(engine).plan.decodes) == batch, "a block ended while it was measured"
        seconds = (time.perf_counter() - started) / num_steps
    finally:
        clear(engine, requests)
    synchronize(engine.runner.cache.data.device)
    return StepTime(batch, context, 0, seconds)


def _step(engine: Engine) -> StepOutput:
    output = engine.step()
    if output is None or output.left:
        raise RuntimeError(f"no block was to end yet: {output and output.errors}")
    return output


def prefill_time(engine: Engine, length: int, repeats: int = 3) -> StepTime:
    """Of one prefill of `length` tokens, canvas included, alone: the median of some."""
    config, scheduler = engine.runner.model.config, engine.scheduler
    taken = []
    for i in range(repeats + 1):
        of = request(f"prefill-{i}", config, length - BLOCK_LENGTH, BLOCK_LENGTH, BLOCK_LENGTH)
        scheduler.add(of)
        synchronize(engine.runner.cache.data.device)
        started = time.perf_counter()
        plan = scheduler.schedule()
        assert plan is not None
        result = engine.runner.launch(plan).result()
        taken.append(time.perf_counter() - started)
        scheduler.update(plan, result)
        clear(engine, [of])
    return StepTime(0, 0, length, statistics.median(taken[1:]))


def write_csv(path: Path, times: Sequence[StepTime]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for of in times:
            writer.writerow((of.num_decodes, of.context, of.prefill_tokens, f"{of.seconds:.6f}"))
