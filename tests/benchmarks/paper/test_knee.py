from __future__ import annotations

import math

import pytest

from benchmarks.paper.knee import knee, load_at

CURVE = [(1.0, 2.0), (2.0, 2.0), (3.0, 4.0), (4.0, 16.0)]


def test_a_latency_between_two_loads_is_interpolated_by_its_logarithm() -> None:
    assert load_at(CURVE, 8.0) == pytest.approx(3.5)
    assert load_at(CURVE, 4.0) == pytest.approx(3.0)


def test_a_latency_outside_of_the_curve_has_no_load() -> None:
    assert load_at(CURVE, 1.0) == -math.inf
    assert load_at(CURVE, 17.0) == math.inf


def test_the_first_rise_counts() -> None:
    assert load_at([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0), (4.0, 3.0)], 3.0) == pytest.approx(2.0)


def test_the_knee_of_a_queue_is_where_it_says() -> None:
    """An M/M/1 queue's mean is 1 / (capacity - load): twice that of load 1 at 5.5 of 10."""
    curve = [(load / 10, 1 / (10 - load / 10)) for load in range(10, 100)]
    assert knee(curve) == pytest.approx(5.5, rel=0.01)
    assert knee(curve, 3) == pytest.approx(7.0, rel=0.01)
    assert knee(curve[:20]) == math.inf
