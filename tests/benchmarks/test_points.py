from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.points import noise, order
from tests.benchmarks.canned import measured


def test_every_point_is_measured_once_and_variants_take_turns() -> None:
    points = order(["a", "b", "c"], [1.0, 2.0], [7, 8], repeats=2)
    assert len(set(points)) == len(points) == 3 * 2 * 2 * 2
    rounds = [points[start : start + 3] for start in range(0, len(points), 3)]
    for one_round in rounds:
        assert {point.variant for point in one_round} == {"a", "b", "c"}
        assert len({(point.rate, point.seed, point.repeat) for point in one_round}) == 1
    firsts = Counter(one_round[0].variant for one_round in rounds)
    assert max(firsts.values()) - min(firsts.values()) <= 1


def test_noise_is_the_spread_of_the_same_point_run_again() -> None:
    results = [measured("a", 1.0, 0.9), measured("a", 1.0, 1.1, repeat=1), measured("a", 1.0, 5.0, seed=2)]
    assert noise(results) == pytest.approx(0.2)
    assert noise(results[1:]) is None
