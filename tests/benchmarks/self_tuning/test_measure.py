from __future__ import annotations

import math

import pytest

from benchmarks.paper.points import DREAM_ARXIV, LLADA_SHAREGPT
from benchmarks.self_tuning import report
from benchmarks.self_tuning.cases import AUTO, BOTH, COMPARISONS, Case
from benchmarks.self_tuning.measure import METRICS, Row

PAST, BEFORE = Case(LLADA_SHAREGPT, 8.0), Case(DREAM_ARXIV, 7.0, 5)
COLOCATED = COMPARISONS["colocated"]


def row(case: Case, metric: str, auto: tuple[float, float]) -> Row:
    """Of the fixed values 1024 has the least geometric mean, 512 the least of any seed."""
    seconds: dict[int | str, tuple[float, ...]] = dict.fromkeys(COLOCATED.fixed, (20.0, 20.0))
    return Row(case, metric, {**seconds, 512: (1.0, 30.0), 1024: (4.0, 4.0), AUTO: auto})


def test_the_best_is_one_value_for_all_seeds_and_ratios_are_of_the_same_seed() -> None:
    found = row(PAST, "mean", (2.0, 8.0))
    assert found.best == 1024
    assert found.ratios(AUTO) == [0.5, 2.0]
    assert math.isclose(found.ratio(AUTO), 1.0)
    assert math.isclose(found.ratio(512), math.sqrt(30 / 16))


def test_what_is_within_2_percent_and_what_is_better_is_counted() -> None:
    rows = [row(case, metric, auto) for case, auto in ((BEFORE, (4.0, 4.1)), (PAST, (3.0, 4.0))) for metric in METRICS]
    text = report.in_short(rows)
    assert "up to the knee, within 2% of the best in 2 of 2, better in 0;" in text
    assert "past it, within 2% of the best in 2 of 2, better in 2." in text
    rows[0] = row(BEFORE, "mean", (4.1, 4.1))
    assert "in 1 of 2, better in 0;" in report.in_short(rows)


def test_tables() -> None:
    rows = [row(PAST, metric, (2.0, 8.0)) for metric in METRICS]
    line = "4.00 | 1024 | **1.000** (0.50 to 2.00)"
    assert f"| {PAST.name} * | {line} | {line} |" in report.by_case(rows, COLOCATED)
    text = report.by_value(rows, COLOCATED)
    assert "| 16384 | 5.000 | 5.000 | 5.000 | 5.000 | 1 of 1 | 0 of 1 |" in text
    assert "| auto | 1.000 | 1.000 | 1.000 | 1.000 |  |  |" in text
    rows[1] = row(PAST, "p99", (3.0, 90.0))
    assert "| 512 | 1.369 | 1.369 | 1.369 | 1.369 | 0 of 1 | 0 of 1 |" in report.by_value(rows, COLOCATED)
    rows[0] = row(PAST, "mean", (3.0, 90.0))
    assert "| 512 | 1.369 | 1.369 | 1.369 | 1.369 | 0 of 1 | 1 of 1 |" in report.by_value(rows, COLOCATED)


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_value_is_one_setting_more_than_the_calibrated_testbed(name: str) -> None:
    comparison = COMPARISONS[name]
    case = comparison.cases[0]
    for value in comparison.values:
        config = case.run(comparison.settings(value), 1, 1).config
        changed = (config.token_budget, config.overflow_threshold)
        assert (
            changed
            == {
                "colocated": (value, 8192),
                "low load": (value, 8192),
                "hybrid": (AUTO, AUTO) if value == BOTH else (1024, value),
            }[name]
        )
        assert (config.num_prefill, config.num_colocated) == (case.num_prefill, 8 - case.num_prefill)


def test_past_the_knee() -> None:
    assert PAST.is_past_knee and not BEFORE.is_past_knee
    assert {name: any(case.is_past_knee for case in c.cases) for name, c in COMPARISONS.items()} == {
        "colocated": True,
        "low load": False,
        "hybrid": True,
    }
