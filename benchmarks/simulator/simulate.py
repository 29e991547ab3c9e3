"""`simulate(config, workload) -> Result`: runs a workload through a graph in simulated time."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

from backend.core.sampling_params import SamplingParams
from benchmarks.lengths import Length
from benchmarks.simulator.clock import Clock
from benchmarks.simulator.config import SimulatorConfig
from benchmarks.simulator.denoising import END_OF_TEXT, TOKEN, Commits, commits_of
from benchmarks.simulator.flight import Trip
from benchmarks.simulator.graph import Graph
from benchmarks.simulator.result import Result, collect
from benchmarks.simulator.timing import Modelled
from benchmarks.simulator.workload import Workload


def simulate(
    config: SimulatorConfig,
    workload: Workload,
    watch: Callable[[Trip], None] | None = None,
    make_graph: Callable[..., Graph] = Graph,
) -> Result:
    """Runs every request to its end. The same arguments give the same result, to the last bit.

    Args:
        watch: called with every request that has its answer; what it raises ends the run.
        make_graph: takes what `Graph` takes; a variant of it.

    Raises:
        ValueError: a request can never fit a worker, the model of forwards per block cannot be (see `Lognormal`), or
            there is no such cache policy or interval.
    """
    clock = Clock()
    trips = [_trip(config, workload, index, length) for index, length in enumerate(workload.lengths)]
    waiting = iter(trips if workload.num_clients else ())

    def on_finished(trip: Trip) -> None:
        if watch:
            watch(trip)
        if (then := next(waiting, None)) is not None:
            graph.arrive(then)

    horizon_s = workload.arrivals_s[-1] if workload.arrivals_s else math.inf
    graph = make_graph(config, clock, Modelled(config, workload.block_length), horizon_s, on_finished)
    if workload.num_clients:
        for trip, _ in zip(waiting, range(workload.num_clients), strict=False):
            clock.after(0.0, graph.arrive, trip)
    else:
        for trip, due_s in zip(trips, workload.arrivals_s, strict=True):
            clock.after(due_s, graph.arrive, trip)
    with _no_collector():
        clock.run()
    graph.check()
    return collect(config, workload, trips, graph)


def _trip(config: SimulatorConfig, workload: Workload, index: int, length: Length) -> Trip:
    block_length, canvas_length = workload.block_length, workload.canvas_of(length)
    num_tokens = workload.num_tokens(length)
    end = num_tokens if workload.mode == "end of text" and num_tokens < canvas_length else None
    max_tokens = num_tokens if end is None else canvas_length
    policy = config.cache_policy, config.cache_refresh_interval
    params = _params(max_tokens, canvas_length, block_length, end is not None, *policy)
    num_blocks = -(-(num_tokens + (end is not None)) // block_length)
    steps = config.steps.draw(workload.seed, index, num_blocks, block_length)
    blocks: list[tuple[Commits, ...]] = [commits_of(num_steps, block_length) for num_steps in steps]
    if end is not None:
        blocks[-1] = commits_of(steps[-1], block_length, end % block_length)
    return Trip(index, str(index), (TOKEN,) * length.num_prompt_tokens, params, blocks)


@lru_cache(maxsize=4096)
def _params(
    max_tokens: int, canvas_length: int, block_length: int, has_end: bool, policy: str, interval: int | None
) -> SamplingParams:
    return SamplingParams(
        max_tokens,
        canvas_length,
        block_length,
        stop_token_ids=(END_OF_TEXT,) if has_end else (),
        cache_policy=policy,
        cache_refresh_interval=interval,
    )


@contextmanager
def _no_collector() -> Iterator[None]:
    """A run makes many objects and no cycles: looking for these would be one twentieth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
