"""Exact match against what it costs, per cache policy and rule of unmasking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plots import COLOURS, DPI
from benchmarks.quality import Cell

MARKERS = "osD^vPX<>*hd"


def trade_off(cells: Sequence[Cell], path: Path) -> None:
    """Writes a PNG: a row per model; left the speed in forwards, right the work in positions."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    figure = Figure(figsize=(13, 4.2 * len(models)), layout="constrained")
    for row, model in zip(figure.subplots(len(models), 2, squeeze=False), models, strict=True):
        of_model = [cell for cell in cells if cell.model == model]
        _scatter(row[0], of_model, lambda cell: cell.tokens_per_forward)
        _scatter(row[1], of_model, lambda cell: cell.positions_per_token)
        row[0].set_title(f"{model}: more to the right is faster", fontsize=10)
        row[0].set_xlabel("tokens returned per forward of a request")
        row[1].set_title(f"{model}: more to the left is less work", fontsize=10)
        row[1].set_xlabel("positions computed per token returned")
        row[1].set_xscale("log")
        row[1].xaxis.set_major_formatter("{x:g}")
        row[1].xaxis.set_minor_formatter("{x:g}")
        row[1].tick_params(axis="x", which="minor", labelsize=7)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=DPI)


def _scatter(axes: Axes, cells: Sequence[Cell], cost: Callable[[Cell], float]) -> None:
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    rules = list(dict.fromkeys(cell.rule for cell in cells))
    for cell in cells:
        axes.scatter(
            cost(cell), 100 * cell.overall,
            color=COLOURS[policies.index(cell.policy)], marker=MARKERS[rules.index(cell.rule) % len(MARKERS)],
            s=30, alpha=0.8,
        )  # fmt: skip
    for policy, colour in zip(policies, COLOURS, strict=False):
        axes.scatter([], [], color=colour, marker="s", label=policy)
    for rule, marker in zip(rules, MARKERS, strict=False):
        axes.scatter([], [], color="#888888", marker=marker, label=rule)
    axes.set_ylabel("exact match over all tasks, %")
    axes.set_ylim(min(axes.get_ylim()[0], 90), 100.5)
    axes.grid(alpha=0.3)
