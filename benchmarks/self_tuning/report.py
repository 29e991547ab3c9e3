"""Ratios as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from benchmarks.self_tuning.cases import AUTO, Comparison
from benchmarks.self_tuning.measure import METRICS, Row

WITHIN = 1.02


def by_case(rows: Sequence[Row], comparison: Comparison) -> str:
    """One line per pair and load."""
    symbol = comparison.symbol
    lines = [
        f"| requests/s | best mean, s | its {symbol} | auto / best | best p99, s | its {symbol} | auto / best |",
        "|---|---|---|---|---|---|---|",
    ]
    for mean, p99 in zip(rows[::2], rows[1::2], strict=True):
        cells = " | ".join(
            f"{geometric_mean(row.seconds[row.best]):.2f} | {row.best} | {_spread(row.ratios(AUTO))}"
            for row in (mean, p99)
        )
        lines.append(f"| {mean.case.name}{' *' if mean.case.is_past_knee else ''} | {cells} |")
    return "\n".join(lines) + "\n"


def by_value(rows: Sequence[Row], comparison: Comparison) -> str:
    """What each value costs against the best of each load: the worst load, and all; and against auto."""
    lines = [
        f"| {comparison.symbol} | mean: worst | all | p99: worst | all | auto is better in both | worse in both |",
        "|---|---|---|---|---|---|---|",
    ]
    for value in comparison.values:
        cells = []
        for metric in METRICS:
            ratios = [row.ratio(value) for row in rows if row.metric == metric]
            cells += [f"{max(ratios):.3f}", f"{geometric_mean(ratios):.3f}"]
        for sign in (1, -1):
            both = (
                all(sign * row.ratio(AUTO) < sign * row.ratio(value) for row in pair)
                for pair in zip(rows[::2], rows[1::2], strict=True)
            )
            cells.append("" if value == AUTO else f"{sum(both)} of {len(rows) // 2}")
        lines.append(f"| {value} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def in_short(rows: Sequence[Row]) -> str:
    """How often the goal is met."""
    parts = []
    for name, is_past in (("up to the knee", False), ("past it", True)):
        of_kind = [row for row in rows if row.case.is_past_knee == is_past]
        num_within = sum(row.ratio(AUTO) <= WITHIN for row in of_kind)
        num_better = sum(row.ratio(AUTO) < 1 for row in of_kind)
        if of_kind:
            parts.append(f"{name}, within 2% of the best in {num_within} of {len(of_kind)}, better in {num_better}")
    return f"Auto, of every load's mean and p99: {'; '.join(parts)}.\n"


def _spread(ratios: Sequence[float]) -> str:
    return f"**{geometric_mean(ratios):.3f}** ({min(ratios):.2f} to {max(ratios):.2f})"
