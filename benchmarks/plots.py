"""Figures of a sweep, as the paper draws them: latency against load per variant, and where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed, and none is opened

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from benchmarks.points import Measured  # noqa: E402
from benchmarks.report import grouped, rest_s  # noqa: E402
from benchmarks.scrape import PHASES  # noqa: E402

COLOURS = ("#4477aa", "#cc6677", "#228833", "#ccbb44", "#aa3377", "#66ccee")
PHASE_COLOURS = ("#bbbbbb", "#4477aa", "#ddcc77", "#ee8866", "#44bb99", "#eeeeee")
MARKERS = "osD^vP"
DPI = 90


def latencies(results: Sequence[Measured], path: Path) -> None:
    """Writes a PNG: mean and p99 end-to-end latency against load, and phases of a mean request at the middle load."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    mean, p99, phases = figure.subplots(1, 3)
    _against_load(mean, results, "mean", lambda run: run.summary.latency.mean)
    _against_load(p99, results, "p99", lambda run: run.summary.latency.p99)
    mean.legend(fontsize=8)
    loads = sorted({run.point.rate for run in results})
    _stacked(phases, results, loads[len(loads) // 2])
    figure.savefig(path, dpi=DPI)


def _against_load(axes: Axes, results: Sequence[Measured], name: str, figure_of: Callable[[Measured], float]) -> None:
    """Lines through the means over a point's runs, bars from their least to their most."""
    lines: dict[str, list[tuple[float, float, float, float]]] = {}
    for (rate, variant), runs in grouped(results).items():
        values = [figure_of(run) for run in runs]
        lines.setdefault(variant, []).append((rate, _mean(values), min(values), max(values)))
    for place, (variant, points) in enumerate(lines.items()):
        rates, means, lows, highs = zip(*points, strict=True)
        below = [mean - low for mean, low in zip(means, lows, strict=True)]
        above = [high - mean for mean, high in zip(means, highs, strict=True)]
        axes.errorbar(
            rates, means, [below, above],
            color=COLOURS[place % len(COLOURS)], marker=MARKERS[place % len(MARKERS)],
            markersize=4, linewidth=1.2, capsize=2, label=variant,
        )  # fmt: skip
    axes.set_title(f"{name} end-to-end latency", fontsize=10)
    axes.set_xlabel("offered load, requests/s")
    axes.set_ylabel("seconds")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(labelsize=8, which="both")
    axes.grid(alpha=0.3, which="both")


def _stacked(axes: Axes, results: Sequence[Measured], rate: float) -> None:
    at_rate = {variant: runs for (load, variant), runs in grouped(results).items() if load == rate}
    names = list(at_rate)
    left = [0.0] * len(names)
    is_per_block = any(run.breakdown.is_per_block for run in results)
    for phase, colour in zip((*PHASES, "rest"), PHASE_COLOURS, strict=True):
        if phase == "rest" and is_per_block:
            continue
        widths = [_mean([_seconds(run, phase) for run in at_rate[name]]) for name in names]
        axes.barh(names, widths, left=left, color=colour, label=phase.replace("_", " "))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    unit = "block" if is_per_block else "request"
    axes.set_title(f"phases of a mean {unit} at {rate:g} requests/s", fontsize=10)
    axes.set_xlabel("seconds")
    axes.invert_yaxis()
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.15))


def _seconds(run: Measured, phase: str) -> float:
    return rest_s(run) if phase == "rest" else run.breakdown.phase_s.get(phase, 0.0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
