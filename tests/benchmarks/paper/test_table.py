from __future__ import annotations

import math

from benchmarks.paper import claims, table
from benchmarks.paper.figures import COLOCATED, DISAGGREGATED, HYBRID
from benchmarks.paper.points import LLADA_SHAREGPT, Point
from benchmarks.paper.table import Row
from tests.benchmarks.paper.canned import seeded

CLAIMS = claims.read()


def means(*seconds: float) -> dict[Point, list[float]]:
    ways = (COLOCATED, HYBRID, DISAGGREGATED)
    return {Point(LLADA_SHAREGPT, way, 7.5): [mean] for way, mean in zip(ways, seconds, strict=True)}


def test_a_number_is_compared_over_seeds() -> None:
    rows = {row.claim.id: row for row in table.rows([seeded(means(8.0, 9, 10), 1), seeded(means(6.2, 9, 10), 2)])}
    row = rows["C064"]
    assert row.values == (8.0, 6.2) and row.median == 7.1 and row.ratio == 1.0
    line = next(line for line in table.markdown(rows.values()).splitlines() if line.startswith("| C064"))
    assert "| 7.1 s | 7.1 (6.2 to 8) s | 1.00 |" in line


def test_an_ordering_is_counted_over_seeds() -> None:
    two = [seeded(means(7, 9, 12), 1), seeded(means(9, 7, 12), 2)]
    row = next(row for row in table.rows(two) if row.claim.id == "C146")
    assert row.values == (1.0, 0.0) and row.num_held == 1
    assert "holds in 1 of 2 seeds" in table.markdown([row])


def test_all_claims_are_rows_and_what_was_not_run_says_so() -> None:
    rows = table.rows([seeded(means(7, 9, 12))])
    assert [row.claim.id for row in rows] == list(CLAIMS)
    by_id = {row.claim.id: row for row in rows}
    assert by_id["C016"].kind == "not run" and by_id["C005"].kind == "not simulated"
    assert all(row.values or row.note for row in rows)


def test_what_is_within() -> None:
    claim = CLAIMS["C064"]
    rows = [Row(claim, "number", (7.1 * ratio,)) for ratio in (0.85, 1.0, 1.05, 1.3, math.inf, -math.inf)]
    assert table.within(rows, 0.10) == (2, 6)
    assert table.within([*rows, Row(claim, "not run"), Row(claim, "setting", (7.1,))], 0.25) == (3, 6)


def test_a_bound_may_not_be_exceeded() -> None:
    row = Row(CLAIMS["C020"], "bound", (4.9, 5.1))
    assert row.num_held == 1 and math.isnan(row.ratio)


def test_numbers_have_three_digits() -> None:
    shown = [table.number(value) for value in (0.01234, 12.345, 1234.5, math.inf, -math.inf)]
    assert shown == ["0.0123", "12.3", "1234", "beyond the sweep", "below the sweep"]
