"""What is read off simulations of one seed, to be held against a number of the paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.paper import one_at_a_time
from benchmarks.paper.knee import Curve, knee, load_at
from benchmarks.paper.points import Calibration, Pair, Point, Results, Variant, workload
from benchmarks.simulator.result import Result

Quantity = Callable[["Seeded"], float]


class NotRun(Exception):
    """A point is needed that was not simulated."""


@dataclass(frozen=True)
class Seeded:
    """The results of one seed. Points of one seed have the same requests and the same forwards per block."""

    results: Results
    seed: int
    num_requests: int

    def of(self, point: Point) -> Result:
        """Raises NotRun."""
        try:
            return self.results[point, self.seed]
        except KeyError:
            raise NotRun(point) from None

    def achieved(self, pair: Pair) -> float:
        """Arrivals per second over the load that was asked for, the same at every load."""
        return workload(pair, 1.0, self.num_requests, self.seed).achieved_rate

    def curve(self, pair: Pair, variant: Variant, loads: Iterable[float], metric: str) -> Curve:
        """Raises NotRun."""
        return [(load, Measure(pair, variant, load, metric)(self)) for load in loads]


@dataclass(frozen=True)
class Measure:
    """One number of one point.

    Attributes:
        metric: a column of the results and a field of `Distribution`: "latency mean", "prefill_queue p99".
    """

    pair: Pair
    variant: Variant
    load: float
    metric: str = "latency mean"
    calibration: Calibration = "as fitted"

    def __call__(self, seeded: Seeded) -> float:
        """Seconds. Raises NotRun."""
        column, statistic = self.metric.split()
        result = seeded.of(Point(self.pair, self.variant, self.load, self.calibration))
        return float(getattr(result.of(f"{column}_s"), statistic))

    def at(self, load: float) -> Measure:
        return Measure(self.pair, self.variant, load, self.metric, self.calibration)


def less_by(lower: Quantity, higher: Quantity) -> Quantity:
    """Percent by which the first is under the second."""
    return lambda seeded: 100 * (1 - lower(seeded) / higher(seeded))


def more_by(higher: Quantity, lower: Quantity) -> Quantity:
    """Percent by which the first is over the second."""
    return lambda seeded: 100 * (higher(seeded) / lower(seeded) - 1)


def ratio(upper: Quantity, lower: Quantity) -> Quantity:
    return lambda seeded: upper(seeded) / lower(seeded)


def total(*quantities: Quantity) -> Quantity:
    return lambda seeded: sum(quantity(seeded) for quantity in quantities)


def least(quantities: Sequence[Quantity]) -> Quantity:
    return lambda seeded: min(quantity(seeded) for quantity in quantities)


def most(quantities: Sequence[Quantity]) -> Quantity:
    return lambda seeded: max(quantity(seeded) for quantity in quantities)


def alone(pair: Pair, load: float) -> Quantity:
    """Mean latency of one request at a time, seconds."""
    return lambda seeded: float(one_at_a_time.latencies_s(pair, load, seeded.num_requests, seeded.seed).mean())


def alone_curve(pair: Pair, loads: Iterable[float]) -> Callable[[Seeded], Curve]:
    return lambda seeded: [(load, alone(pair, load)(seeded)) for load in loads]


def alone_knee(pair: Pair, loads: Iterable[float]) -> Quantity:
    """Where one request at a time doubles the mean latency of its lowest load."""
    curve = alone_curve(pair, loads)
    return lambda seeded: knee(curve(seeded))


def comparable_load(pair: Pair, variant: Variant, loads: Iterable[float], alone_loads: Sequence[float]) -> Quantity:
    """Where a variant's mean latency is what one request at a time has at its knee."""
    curve = alone_curve(pair, alone_loads)

    def load(seeded: Seeded) -> float:
        alone = curve(seeded)
        return load_at(seeded.curve(pair, variant, loads, "latency mean"), 2 * alone[0][1])

    return load


def request_like(pair: Pair, variants: Sequence[Variant], load: float, statistic: str) -> Callable[[Seeded], int]:
    """Figure 11's choice: the request that is nearest to every variant's own p50 or p99, by its worst variant."""

    def index(seeded: Seeded) -> int:
        apart = []
        for variant in variants:
            latency = seeded.of(Point(pair, variant, load)).requests["latency_s"]
            apart.append(np.abs(latency / np.percentile(latency, float(statistic[1:])) - 1))
        return int(np.argmin(np.max(apart, axis=0)))

    return index


def of_request(index: Callable[[Seeded], int], point: Point, column: str) -> Quantity:
    """Seconds of one request."""
    return lambda seeded: float(seeded.of(point).requests[f"{column}_s"][index(seeded)])


@cache
def _lengths(pair: Pair, num_requests: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    lengths = workload(pair, 1.0, num_requests, seed).lengths
    return tuple(x.num_prompt_tokens for x in lengths), tuple(x.num_output_tokens for x in lengths)


def tokens(pair: Pair, part: str, statistic: str) -> Quantity:
    """Of a generated trace's "prompt" or "output"; statistic "p50", "p99" or "std"."""

    def value(seeded: Seeded) -> float:
        lengths = _lengths(pair, seeded.num_requests, seeded.seed)[part == "output"]
        return float(np.std(lengths) if statistic == "std" else np.percentile(lengths, float(statistic[1:])))

    return value
