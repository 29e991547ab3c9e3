from __future__ import annotations

import math

import pytest

from benchmarks.paper import orderings
from benchmarks.paper.figures import COLOCATED, DISAGGREGATED, HYBRID, WAY_LOADS, WAYS
from benchmarks.paper.orderings import ORDERINGS, SATURATED, first_to_saturate, saturation
from benchmarks.paper.points import LLADA_SHAREGPT, Point, colocated
from benchmarks.paper.quantities import Seeded
from tests.benchmarks.paper.canned import seeded

LOADS = WAY_LOADS[LLADA_SHAREGPT]


def curves(at_last: dict[object, float]) -> Seeded:
    """Means of 1 s at every load but the last."""
    points = {Point(LLADA_SHAREGPT, way, load): [1.0] for way in WAYS for load in LOADS}
    return seeded(points | {Point(LLADA_SHAREGPT, way, LOADS[-1]): [at_last[way]] for way in WAYS})


def test_saturation_is_at_one_latency_for_all_and_at_the_loads_that_really_were() -> None:
    results = curves({COLOCATED: SATURATED**2, DISAGGREGATED: SATURATED, HYBRID: 2.0})
    achieved = results.achieved(LLADA_SHAREGPT)
    found = [saturation(results, LLADA_SHAREGPT, way) for way in (COLOCATED, DISAGGREGATED, HYBRID)]
    assert found == pytest.approx([achieved * (LOADS[-2] + LOADS[-1]) / 2, achieved * LOADS[-1], math.inf])
    assert not first_to_saturate(results, LLADA_SHAREGPT)
    assert first_to_saturate(curves({COLOCATED: 4.0, DISAGGREGATED: 9.0, HYBRID: 5.0}), LLADA_SHAREGPT)


@pytest.mark.parametrize(
    ("p99s", "holds"), [((40, 20, 21, 22), True), ((40, 22, 21, 23), False), ((21, 20, 22, 23), False)]
)
def test_budgets_on_sharegpt(p99s: tuple[float, ...], holds: bool) -> None:
    points = {
        Point(LLADA_SHAREGPT, colocated(tau), load): [p99]
        for tau, p99 in zip((512, 1024, 2048, 16384), p99s, strict=True)
        for load in (6.5, 7.0, 7.5)
    }
    assert ORDERINGS["C152"].holds(seeded(points)) is holds


def test_equal_latencies_are_in_no_strict_order() -> None:
    points = {Point(LLADA_SHAREGPT, way, 7.5): [1.0] for way in WAYS}
    assert not ORDERINGS["C146"].holds(seeded(points))


def test_only_what_is_handed_over_has_another_calibration_without_its_cost() -> None:
    points = {
        Point(LLADA_SHAREGPT, COLOCATED, 7.5): [1.0],
        Point(LLADA_SHAREGPT, DISAGGREGATED, 7.5, "no hand-over cost"): [2.0],
        Point(LLADA_SHAREGPT, HYBRID, 7.5, "no hand-over cost"): [3.0],
    }
    assert orderings.under("no hand-over cost", LLADA_SHAREGPT, 7.5)(seeded(points)) == [1.0, 2.0, 3.0]
