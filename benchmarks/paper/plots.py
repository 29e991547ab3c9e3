"""The paper's figures, drawn as it draws them, from the simulations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from backend.core.step import PHASES
from benchmarks.paper import claims, decode_steps, figures, one_at_a_time
from benchmarks.paper.axes import COLOURS, band, crosses, curves, finish, legend, new, spread, stated
from benchmarks.paper.points import LLADA_ARXIV, LLADA_SHAREGPT, PAIRS, Pair, Point, Variant, colocated, disaggregated
from benchmarks.paper.quantities import Measure, Seeded, request_like

PHASE_COLOURS = {"prefill_queue": "#bbbbbb", "prefill": "#4477aa", "decode": "#44bb99", "other": "#eeeeee"}
DPI = 75
MEAN_AND_P99 = ("latency mean", "latency p99")


def draw(figure: int, seededs: Sequence[Seeded], path: Path) -> None:
    """Writes one figure as PNG. Raises NotRun if its points were not simulated."""
    _DRAW[figure](seededs).savefig(path, dpi=DPI)


def _figure3(seededs: Sequence[Seeded]) -> Figure:
    figure, panels = new(1, 2)
    by_label = {decoder.label: decoder for decoder in decode_steps.DECODERS}
    for axes, decoder in zip(panels, [d for d in decode_steps.DECODERS if d.beside], strict=True):
        for each, colour in zip((decoder, by_label[decoder.beside]), COLOURS, strict=False):
            axes.plot(decode_steps.BATCHES, decode_steps.step_ms(each), color=colour, marker="o", label=each.label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(decode_steps.BATCHES, map(str, decode_steps.BATCHES))
        axes.set_ylim(bottom=0)
        finish(axes, f"{decoder.label} beside {decoder.beside}", "batch, requests", "decode iteration, ms")
        axes.legend(fontsize=7)
    return figure


def _figure5(seededs: Sequence[Seeded]) -> Figure:
    figure, panels = new(1, 2)
    splits = [disaggregated(num_prefill) for num_prefill in figures.SPLITS]
    delays = {"prefill_queue p50": "at prefill workers", "decode_queue p50": "at decode workers"}
    for axes, bars, title in (
        (panels[0], {"latency p50": "end to end"}, "median end-to-end latency"),
        (panels[1], delays, "median scheduling delay"),
    ):
        width = 0.8 / len(bars)
        for at, (metric, label) in enumerate(bars.items()):
            measures = [Measure(LLADA_SHAREGPT, split, figures.SPLIT_LOAD, metric) for split in splits]
            middles, ranges = spread([[measure(seeded) for measure in measures] for seeded in seededs])
            places = np.arange(len(splits)) + (at - (len(bars) - 1) / 2) * width
            axes.bar(places, middles, width, yerr=ranges, capsize=2, color=COLOURS[at], label=label)
            for place, split in zip(places, splits, strict=True):
                crosses(axes, [(place, y) for _, y in stated(LLADA_SHAREGPT, split, metric)], COLOURS[at])
        finish(axes, f"LLaDA-8B, ShareGPT at {figures.SPLIT_LOAD:g} requests/s", "split of eight GPUs", f"{title}, s")
        axes.set_xticks(range(len(splits)), [split.label.split()[1] for split in splits])
        legend(axes)
    return figure


def _figure8(seededs: Sequence[Seeded]) -> Figure:
    figure, panels = new(2, 2)
    loads, reduce = figures.ALONE_LOADS, (np.mean, lambda values: np.percentile(values, 99))
    for at, axes in enumerate(panels):
        pair, row = (LLADA_SHAREGPT, LLADA_ARXIV)[at % 2], at // 2
        curves(axes, seededs, pair, [figures.ONE_GPU], figures.ONE_GPU_LOADS, MEAN_AND_P99[row])
        per_seed = [
            [float(reduce[row](one_at_a_time.latencies_s(pair, load, s.num_requests, s.seed))) for load in loads]
            for s in seededs
        ]
        band(axes, loads, per_seed, COLOURS[1], "Fast-dLLM, one request at a time")
        if at == 0:
            crosses(axes, [(0.5, claims.read()["C049"].number or 0.0)], COLOURS[1])
        legend(axes)
    return figure


def _figure9(seededs: Sequence[Seeded]) -> Figure:
    figure, panels = new(2, 4, 3.6, 3.0)
    for row, metric in enumerate(MEAN_AND_P99):
        for pair, axes in zip(PAIRS, panels[4 * row : 4 * row + 4], strict=True):
            curves(axes, seededs, pair, figures.WAYS, figures.WAY_LOADS[pair], metric)
    legend(panels[0])
    return figure


def _figure10(seededs: Sequence[Seeded]) -> Figure:
    figure, panels = new(1, 4, 3.6, 3.0)
    shown = (("prefill_queue", "prefill queueing delay"), ("decode", "decode time"))
    places = [(pair, load, *of) for pair, load in figures.CDF_LOADS.items() for of in shown]
    quantiles = np.linspace(0, 1, 201)
    for axes, (pair, load, column, title) in zip(panels, places, strict=True):
        for way, colour in zip(figures.WAYS, COLOURS, strict=False):
            for seeded in seededs:
                seconds = np.quantile(seeded.of(Point(pair, way, load)).requests[f"{column}_s"], quantiles)
                label = way.label if seeded is seededs[0] else None
                axes.plot(seconds, quantiles, color=colour, linewidth=1, alpha=0.7, label=label)
            for statistic, quantile in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
                crosses(axes, [(y, quantile) for _, y in stated(pair, way, f"{column} {statistic}")], colour)
        finish(axes, f"{pair.label} at {load:g} requests/s", f"{title} of a request, s", "part of requests")
    legend(panels[0])
    return figure


def _figure11(seededs: Sequence[Seeded]) -> Figure:
    figure, panels = new(2, 4, 3.6, 3.0)
    budgets = [colocated(tau) for tau in figures.BUDGETS]
    for pair, above, below in zip(PAIRS, panels[:4], panels[4:], strict=True):
        curves(above, seededs, pair, budgets, figures.BUDGET_LOADS[pair], "latency p99")
        _breakdown(below, seededs[0], pair, budgets)
    legend(panels[0])
    panels[4].legend(fontsize=6, loc="upper right")
    return figure


def _breakdown(axes: Axes, seeded: Seeded, pair: Pair, budgets: Sequence[Variant]) -> None:
    """Of one seed: a mean over seeds would be of no request."""
    load = figures.BREAKDOWN_LOADS[pair]
    names, rows = [], []
    for statistic in ("p50", "p99"):
        index = request_like(pair, budgets, load, statistic)(seeded)
        for budget in budgets:
            columns = seeded.of(Point(pair, budget, load)).requests
            seconds = {phase: float(columns[f"{phase}_s"][index]) for phase in PHASES}
            rows.append(seconds | {"other": float(columns["latency_s"][index]) - sum(seconds.values())})
            names.append(f"{statistic}, τ={budget.tau}")
    left = np.zeros(len(rows))
    for phase, colour in PHASE_COLOURS.items():
        widths = np.array([row[phase] for row in rows])
        axes.barh(
            names, widths, left=left, color=colour, edgecolor="#888888", linewidth=0.3, label=phase.replace("_", " ")
        )
        left += widths
    axes.invert_yaxis()
    finish(axes, f"{pair.label}: one request at {load:g}/s", "seconds", "")


def _figure12(seededs: Sequence[Seeded]) -> Figure:
    figure, panels = new(2, 2)
    for at, axes in enumerate(panels):
        variants = figures.HYBRIDS[:2] if at < 2 else figures.HYBRIDS[2:]
        curves(axes, seededs, LLADA_SHAREGPT, variants, figures.HYBRID_LOADS, MEAN_AND_P99[at % 2])
        legend(axes)
    return figure


_DRAW: dict[int, Callable[[Sequence[Seeded]], Figure]] = {
    3: _figure3,
    5: _figure5,
    8: _figure8,
    9: _figure9,
    10: _figure10,
    11: _figure11,
    12: _figure12,
}
