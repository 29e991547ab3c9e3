"""One simulation that the search asks for, and what is kept of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from types import TracebackType

import numpy as np
import numpy.typing as npt

from benchmarks import processes
from benchmarks.planner.slo import Missed, Slo
from benchmarks.simulator.config import SimulatorConfig
from benchmarks.simulator.result import Result
from benchmarks.simulator.simulate import simulate
from benchmarks.simulator.workload import Workload, draw


@dataclass(frozen=True)
class Demand:
    """What is asked of every candidate: lengths, and what latency is good enough.

    Attributes:
        canvas_length: masks after every prompt; None: as `draw`.
    """

    trace: str
    slo: Slo
    canvas_length: int | None = None

    def workload(self, num_requests: int, seed: int, load: float) -> Workload:
        """As `draw` gives it. Raises ValueError or OSError, as it does."""
        return _drawn(self.trace, num_requests, seed, load, self.canvas_length)


@lru_cache(maxsize=64)
def _drawn(trace: str, num_requests: int, seed: int, load: float, canvas_length: int | None) -> Workload:
    return draw(trace, num_requests, seed, qps=load, canvas_length=canvas_length)


@dataclass(frozen=True)
class Trial:
    """A configuration under a load in requests per second.

    Attributes:
        may_stop: as soon as the objective can no longer be met.
    """

    config: SimulatorConfig
    load: float
    seed: int
    num_requests: int
    may_stop: bool = True


@dataclass(frozen=True)
class Point:
    """What a trial gave. One that was stopped has infinite figures.

    Attributes:
        ratio: see `Slo.ratio`.
        figures_s: each bound's figure, in their order.
        peak_tokens: prompt + canvas tokens in flight at most.
    """

    ratio: float = math.inf
    mean_s: float = math.inf
    p99_s: float = math.inf
    figures_s: tuple[float, ...] = ()
    peak_tokens: int = 0


Ask = Callable[[Sequence[Trial]], Sequence[Point]]


def measure(demand: Demand, trial: Trial) -> Point:
    """Runs a trial. Raises: see `simulate` and `draw`."""
    workload = demand.workload(trial.num_requests, trial.seed, trial.load)
    try:
        result = simulate(trial.config, workload, demand.slo.watch(workload.arrivals_s) if trial.may_stop else None)
    except Missed:
        return Point()
    latencies = result.requests["latency_s"]
    figures = tuple(bound.of(latencies) for bound in demand.slo.bounds)
    mean, p99 = float(latencies.mean()), float(np.percentile(latencies, 99))
    return Point(demand.slo.ratio(latencies), mean, p99, figures, _peak_tokens(workload, result))


def _peak_tokens(workload: Workload, result: Result) -> int:
    sizes = np.array([length.num_prompt_tokens + workload.canvas_of(length) for length in workload.lengths])
    due_s: npt.NDArray[np.float64] = result.requests["due_s"]
    times = np.concatenate([due_s, due_s + result.requests["latency_s"]])
    in_flight = np.concatenate([sizes, -sizes])[np.argsort(times, kind="stable")].cumsum()
    return int(in_flight.max())


class Trials:
    """Runs trials in processes, each once; one that may stop is answered by one that may not, too.

    Args:
        num_processes: 1: in this one.
        on_measured: called after each.
    """

    def __init__(self, demand: Demand, num_processes: int, on_measured: Callable[[], None] = lambda: None) -> None:
        self._demand, self._on_measured = demand, on_measured
        self._points: dict[Trial, Point] = {}
        self._stack = ExitStack()
        self._pool = self._stack.enter_context(processes.pool(num_processes)) if num_processes > 1 else None

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def ask(self, trials: Sequence[Trial]) -> list[Point]:
        """Raises: see `measure`."""
        new = [trial for trial in dict.fromkeys(trials) if trial not in self._points]
        asked = [self._pool.submit(measure, self._demand, trial) for trial in new] if self._pool else None
        for number, trial in enumerate(new):
            point = asked[number].result() if asked else measure(self._demand, trial)
            self._points[trial] = point
            if math.isfinite(point.ratio):
                self._points[replace(trial, may_stop=not trial.may_stop)] = point
            self._on_measured()
        return [self._points[trial] for trial in trials]
