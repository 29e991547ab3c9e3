"""A plan on the terminal, and its curves as a figure."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.planner.planning import Infeasible, Plan
from benchmarks.planner.slo import Slo
from benchmarks.planner.trial import Point


def show(plan: Plan, slo: Slo, console: Console) -> None:
    best, num_seeds = plan.best, len(plan.best.loads)
    low, high = min(best.loads), max(best.loads)
    console.print(
        f"{best.config.name} bears {best.load:.2f} requests/s within {slo} ({low:.2f} to {high:.2f} over {num_seeds} "
        f"seeds), the best of {plan.num_screened} configurations\n"
    )
    table = _table("finalists", "requests/s", "over seeds", "per GPU", "GPU s/request", "best on")
    for capacity in plan.capacities:
        every = zip(*(other.loads for other in plan.capacities), strict=True)
        wins = sum(load == max(loads) for load, loads in zip(capacity.loads, every, strict=True))
        table.add_row(
            capacity.config.name,
            f"{capacity.load:.2f}",
            f"{min(capacity.loads):.2f} to {max(capacity.loads):.2f}",
            f"{capacity.per_gpu:.3f}",
            f"{1 / capacity.per_gpu:.2f}" if capacity.load else "-",
            f"{wins} of {num_seeds}",
        )
    console.print(table)
    console.print("\nmean / p99 end-to-end latency, seconds, on the first seed", style="dim")
    curves = _table("requests/s", *(config.name for config in plan.curves))
    for load in next(iter(plan.curves.values())):
        curves.add_row(f"{load:.2f}", *(_cell(points[load]) for points in plan.curves.values()))
    console.print(curves)
    console.print("✗ misses the objective", style="dim")


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _cell(point: Point) -> str:
    return f"{point.mean_s:.1f} / {point.p99_s:.1f} {'✗' if point.ratio >= 1 else ' '}"


def show_infeasible(error: Infeasible, slo: Slo, console: Console) -> None:
    figures = zip(slo.bounds, error.point.figures_s, strict=True)
    attained = ", ".join(f"{bound.figure} {figure:.2f} s" for bound, figure in figures)
    console.print(f"nothing meets {slo}: alone in an empty system ({error.config.name}), requests have {attained}")


def draw(plan: Plan, slo: Slo, path: Path) -> None:
    """Writes a PNG: mean and p99 against load, of the best of each graph. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    from benchmarks.plots import COLOURS, DPI, MARKERS

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = dict(zip(("mean", "p99"), figure.subplots(1, 2), strict=True))
    for name, panel in axes.items():
        for (config, points), colour, marker in zip(plan.curves.items(), COLOURS, MARKERS, strict=False):
            seconds = [point.mean_s if name == "mean" else point.p99_s for point in points.values()]
            panel.plot(
                list(points), seconds, color=colour, marker=marker, markersize=4, linewidth=1.2, label=config.name
            )
        for bound in slo.bounds:
            if bound.figure == name:
                panel.axhline(bound.seconds, color="black", linewidth=0.8, linestyle=":", label=str(bound))
        panel.axvspan(min(plan.best.loads), max(plan.best.loads), color="grey", alpha=0.2, label="capacity over seeds")
        panel.set_title(f"{name} end-to-end latency", fontsize=10)
        panel.set_xlabel("offered load, requests/s")
        panel.set_ylabel("seconds")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=DPI)
