"""The load at which our curve has the latency that the paper states at a load: how far apart two curves lie.

The text gives one or two points of a curve, none of them at low load, so that the paper's own knees, as multiples of
the latency at low load, cannot be computed: for each of its points on the rising part this is what can.

Loads of ours are what the arrival process really did: 2000 arrivals are up to 3% faster or slower than asked for, which
near saturation is half a latency.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.paper import claims
from benchmarks.paper.figures import ALONE_LOADS, POINTS, WAYS
from benchmarks.paper.knee import Curve, load_at
from benchmarks.paper.mapping import SIMULATED
from benchmarks.paper.orderings import saturation
from benchmarks.paper.points import LLADA_SHAREGPT, PAIRS, Pair, Variant
from benchmarks.paper.quantities import Measure, NotRun, Seeded, alone_curve
from benchmarks.paper.table import number

TOLERANCE = 0.10
_LATENCIES = ("latency mean", "latency p99")


@dataclass(frozen=True)
class Row:
    """Attributes:
    name: a claim's id and curve.
    latency_s: the paper's, at `load`.
    ours: the load at which ours has it, one per seed.
    """

    name: str
    load: float
    latency_s: float
    ours: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / self.load

    @property
    def is_within(self) -> bool:
        return abs(self.ratio - 1) <= TOLERANCE


def loads_of(pair: Pair, variant: Variant) -> list[float]:
    """All loads at which some figure has this curve."""
    points = (point for of_figure in POINTS.values() for point in of_figure)
    return sorted({point.load for point in points if (point.pair, point.variant) == (pair, variant)})


def at_same_latency(seededs: Sequence[Seeded]) -> list[Row]:
    """Of every claimed mean or p99 latency whose curve was simulated."""
    stated, found = claims.read(), []
    for claim_id, simulated in SIMULATED.items():
        latency_s, measure = stated[claim_id].number, simulated.of
        if not (isinstance(measure, Measure) and latency_s is not None and measure.metric in _LATENCIES):
            continue
        loads = loads_of(measure.pair, measure.variant)
        try:
            curves = [_achieved(seeded, measure.pair, measure.variant, loads, measure.metric) for seeded in seededs]
        except NotRun:
            continue
        name = f"{claim_id} {measure.pair.label}: {measure.variant.label}, {measure.metric.split()[1]}"
        found.append(Row(name, measure.load, latency_s, tuple(load_at(curve, latency_s) for curve in curves)))
    alone, latency_s = alone_curve(LLADA_SHAREGPT, ALONE_LOADS), stated["C049"].number or math.nan
    ours = tuple(seeded.achieved(LLADA_SHAREGPT) * load_at(alone(seeded), latency_s) for seeded in seededs)
    return [Row(f"C049 {LLADA_SHAREGPT.label}: Fast-dLLM, one GPU, mean", 0.5, latency_s, ours), *found]


def _achieved(seeded: Seeded, pair: Pair, variant: Variant, loads: Sequence[float], metric: str) -> Curve:
    part = seeded.achieved(pair)
    return [(load * part, latency_s) for load, latency_s in seeded.curve(pair, variant, loads, metric)]


def markdown(rows: Iterable[Row]) -> str:
    lines = ["| claim | seconds | paper's load | ours | ratio |", "|---|---|---|---|---|"]
    for row in rows:
        shown = number(row.ratio) if math.isfinite(row.ratio) else ""
        lines.append(f"| {row.name} | {row.latency_s:g} | {row.load:g} | {_spread(row.ours)} | {shown} |")
    return "\n".join(lines) + "\n"


def own_knees(seededs: Sequence[Seeded]) -> str:
    """Markdown: where each way to serve saturates, per pair."""
    lines = ["| | " + " | ".join(way.label for way in WAYS) + " |", "|---" * (len(WAYS) + 1) + "|"]
    for pair in PAIRS:
        try:
            cells = [_spread([saturation(seeded, pair, way) for seeded in seededs]) for way in WAYS]
        except NotRun:
            continue
        lines.append(f"| {pair.label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float]) -> str:
    low, middle, high = (number(value) for value in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"
