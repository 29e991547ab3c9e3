"""What all figures share: curves with their spread over seeds, and the paper's points as crosses."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import matplotlib

matplotlib.use("Agg")  # no display is needed, and none is opened

import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from benchmarks.paper import claims  # noqa: E402
from benchmarks.paper.mapping import SIMULATED  # noqa: E402
from benchmarks.paper.points import Pair, Variant  # noqa: E402
from benchmarks.paper.quantities import Measure, Seeded  # noqa: E402

COLOURS = ("#4477aa", "#cc6677", "#228833", "#aa3377", "#ccbb44")
PAPER = "the paper"


def new(rows: int, columns: int, width: float = 4.0, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, list(np.atleast_1d(figure.subplots(rows, columns)).flat)


def finish(axes: Axes, title: str, x: str, y: str, *, is_log: bool = False) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    if is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(labelsize=7, which="both")
    axes.grid(alpha=0.3, which="both")


def spread(per_seed: Sequence[Sequence[float]]) -> tuple[list[float], tuple[list[float], list[float]]]:
    """Per column: the median over seeds, and how far below and above it the seeds go."""
    columns = list(zip(*per_seed, strict=True))
    middles = [statistics.median(column) for column in columns]
    below = [middle - min(column) for middle, column in zip(middles, columns, strict=True)]
    above = [max(column) - middle for middle, column in zip(middles, columns, strict=True)]
    return middles, (below, above)


def band(axes: Axes, loads: Sequence[float], per_seed: Sequence[Sequence[float]], colour: str, label: str) -> None:
    """A line through the medians over seeds, their range as a band."""
    middles, (below, above) = (np.array(part) for part in spread(per_seed))
    axes.plot(loads, middles, color=colour, marker="o", markersize=3, label=label)
    axes.fill_between(loads, middles - below, middles + above, color=colour, alpha=0.15, linewidth=0)


def stated(pair: Pair, variant: Variant, metric: str) -> list[tuple[float, float]]:
    """(load, seconds) of the paper's points on a curve."""
    found, numbers = [], claims.read()
    for claim_id, simulated in SIMULATED.items():
        of = simulated.of
        if isinstance(of, Measure) and (of.pair, of.variant, of.metric) == (pair, variant, metric):
            number = numbers[claim_id].number
            if number is not None and "upper bound" not in numbers[claim_id].metric:
                found.append((of.load, number))
    return found


def crosses(axes: Axes, points: Iterable[tuple[float, float]], colour: str) -> None:
    for x, y in points:
        axes.plot([x], [y], color=colour, marker="X", markersize=9, markeredgecolor="black", linestyle="none", zorder=3)


def curves(
    axes: Axes, seededs: Sequence[Seeded], pair: Pair, variants: Sequence[Variant], loads: Sequence[float], metric: str
) -> None:
    for variant, colour in zip(variants, COLOURS, strict=False):
        per_seed = [[y for _, y in seeded.curve(pair, variant, loads, metric)] for seeded in seededs]
        band(axes, loads, per_seed, colour, variant.label)
        crosses(axes, stated(pair, variant, metric), colour)
    name = metric.split()[1]
    finish(axes, f"{pair.label}: {name}", "load, requests/s", f"{name} end-to-end latency, s", is_log=True)


def legend(axes: Axes) -> None:
    axes.plot([], [], color="white", marker="X", markersize=8, markeredgecolor="black", linestyle="none", label=PAPER)
    axes.legend(fontsize=7)
