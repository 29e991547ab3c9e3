"""The claims table: every number of the paper beside ours, and how the two compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.paper import claims
from benchmarks.paper.claims import Claim
from benchmarks.paper.given import NOT_SIMULATED, SETTINGS
from benchmarks.paper.mapping import SIMULATED
from benchmarks.paper.orderings import ORDERINGS
from benchmarks.paper.quantities import NotRun, Seeded

Kind = Literal["number", "trace", "percent", "bound", "ordering", "setting", "not simulated", "not run"]


@dataclass(frozen=True)
class Row:
    """One claim.

    Attributes:
        values: ours, one per seed; of an ordering 1 where it holds. One value for a setting.
        kind: "percent" is by how much one of two is better, "bound" a number that ours may not exceed.
        note: how it was taken, or why it was not.
    """

    claim: Claim
    kind: Kind
    values: tuple[float, ...] = ()
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def has_ratio(self) -> bool:
        return self.kind in ("number", "trace") and bool(self.claim.number)

    @property
    def ratio(self) -> float:
        """Ours over the paper's; nan where it has no number, or zero."""
        number = self.claim.number
        return self.median / number if number and self.has_ratio else math.nan

    @property
    def num_held(self) -> int:
        """Seeds in which an ordering or a bound holds."""
        if self.kind == "ordering":
            return round(sum(self.values))
        bound = self.claim.number
        return sum(bound is not None and value <= bound for value in self.values)


def rows(seededs: Sequence[Seeded]) -> list[Row]:
    """Of every claim, in order of its id."""
    return [_row(claim, seededs) for claim in claims.read().values()]


def _row(claim: Claim, seededs: Sequence[Seeded]) -> Row:
    if claim.id in NOT_SIMULATED:
        return Row(claim, "not simulated", note=NOT_SIMULATED[claim.id])
    if claim.id in SETTINGS:
        return Row(claim, "setting", (float(SETTINGS[claim.id]()),))
    if claim.id in ORDERINGS:
        ordering = ORDERINGS[claim.id]
        return _measured(claim, "ordering", ordering.holds, ordering.says, seededs)
    simulated = SIMULATED[claim.id]
    kind: Kind = "number"
    if simulated.kind != "result":
        kind = simulated.kind
    elif "upper bound" in claim.metric:
        kind = "bound"
    elif claim.unit == "%":
        kind = "percent"
    return _measured(claim, kind, simulated.of, simulated.how, seededs)


def _measured(claim: Claim, kind: Kind, of: Callable[[Seeded], float], note: str, seededs: Sequence[Seeded]) -> Row:
    try:
        return Row(claim, kind, tuple(float(of(seeded)) for seeded in seededs), note)
    except NotRun:
        return Row(claim, "not run", note="its figure was not asked for")


def within(found: Iterable[Row], tolerance: float) -> tuple[int, int]:
    """How many results are within, and how many have a ratio. What is beyond a sweep is not within."""
    ratios = [row.ratio for row in found if row.has_ratio and row.kind == "number"]
    return sum(abs(ratio - 1) <= tolerance for ratio in ratios), len(ratios)


def markdown(found: Iterable[Row]) -> str:
    lines = ["| | | claim | paper | ours | ratio | note |", "|---|---|---|---|---|---|---|"]
    for row in found:
        claim = row.claim
        of = ", ".join(part for part in (claim.model, claim.trace, claim.configuration) if part and part != "ordering")
        load = f" at {claim.load}" if claim.load else ""
        cells = (
            claim.id,
            claim.source,
            f"{of}{load}: {claim.metric}",
            _paper(claim),
            _ours(row),
            _ratio(row),
            row.note,
        )
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _paper(claim: Claim) -> str:
    return f"{claim.value} {_unit(claim)}".strip()


def _unit(claim: Claim) -> str:
    return "" if claim.unit == "ordering" else claim.unit


def _ours(row: Row) -> str:
    if not row.values:
        return row.kind
    held = f"holds in {row.num_held} of {len(row.values)} seeds"
    if row.kind == "ordering":
        return held
    low, high, unit = min(row.values), max(row.values), _unit(row.claim)
    if row.kind == "setting":
        return f"{number(low)} {unit} (given)"
    spread = f" ({number(low)} to {number(high)})" if number(low) != number(high) else ""
    return f"{number(row.median)}{spread} {unit}".strip() + (f", {held}" if row.kind == "bound" else "")


def _ratio(row: Row) -> str:
    return "" if not row.values or math.isnan(row.ratio) else f"{row.ratio:.2f}"


def number(value: float) -> str:
    """Three digits; "beyond" and "below" a sweep where a load was looked for and not found."""
    if math.isinf(value):
        return "beyond the sweep" if value > 0 else "below the sweep"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
