from __future__ import annotations

import random

import pytest

from benchmarks.planner.search import STEP, Question, Standing, load_at, place_below, race, together

CAPACITY = {"a": 3.7, "b": 5.2, "c": 5.6, "d": 0.9}


class Oracle:
    """Bears loads below a capacity."""

    def __init__(self, capacity: dict[str, float]) -> None:
        self.capacity = capacity
        self.asked: list[Question[str]] = []
        self.num_batches = 0

    def __call__(self, questions: list[Question[str]]) -> list[float]:
        self.asked += questions
        self.num_batches += 1
        return [load / self.capacity[name] for name, load in questions]


def run(oracle: Oracle, names: str, start: float, **how: int) -> list[Standing[str]]:
    (standings,) = together([race(list(names), start, **{"stride": 8, **how})], oracle)
    return standings


def test_the_grid_is_ascending_and_found_again() -> None:
    loads = [load_at(place) for place in range(-200, 200)]
    assert all(low < high for low, high in zip(loads, loads[1:], strict=False))
    assert all(load_at(place_below(load)) <= load * 1.001 < load_at(place_below(load) + 1) for load in loads)


@pytest.mark.parametrize("start", [0.01, 0.5, 5.0, 80.0])
@pytest.mark.parametrize("name", "abcd")
def test_a_capacity_is_found_from_below_and_above(name: str, start: float) -> None:
    oracle = Oracle(CAPACITY)
    (standing,) = run(oracle, name, start)
    assert standing.load < CAPACITY[name] <= standing.load * STEP * 1.001
    assert standing.ratio == pytest.approx(standing.load / CAPACITY[name])
    assert len(oracle.asked) < 18 and len(set(oracle.asked)) == len(oracle.asked)


@pytest.mark.parametrize("start", [0.5, 4.0, 40.0])
def test_a_race_is_won_by_the_best_and_who_failed_is_not_asked_higher(start: float) -> None:
    oracle = Oracle(CAPACITY)
    standings = run(oracle, "abcd", start)
    assert standings[0].candidate == "c"
    assert standings[0].load < CAPACITY["c"] <= standings[0].load * STEP * 1.001
    for name in "abd":
        failed = [load for other, load in oracle.asked if other == name and load >= CAPACITY[name]]
        assert failed == sorted(set(failed), reverse=True)
    assert len(oracle.asked) < 35


def test_a_coarse_race_asks_less_and_ranks_who_is_left_by_the_ratio() -> None:
    fine, coarse = Oracle(CAPACITY), Oracle(CAPACITY)
    run(fine, "bc", 1.0)
    first, second = run(coarse, "bc", 1.0, resolution=8)
    assert len(coarse.asked) < len(fine.asked)
    assert (first.candidate, second.candidate) == ("c", "b")


def test_who_bears_nothing_or_everything_ends_the_search() -> None:
    (nothing,) = run(Oracle({"a": 1e-12}), "a", 1.0)
    assert nothing.load == 0
    (everything,) = run(Oracle({"a": 1e12}), "a", 1.0)
    assert everything.load == pytest.approx(1e3, rel=0.04)


def test_races_run_in_step_and_do_not_mix() -> None:
    oracle = Oracle(CAPACITY)
    results = together([race([name], 1.0, stride=8) for name in "abcd"], oracle)
    alone = [run(Oracle(CAPACITY), name, 1.0) for name in "abcd"]
    assert results == alone
    assert oracle.num_batches < len(oracle.asked) / 2


def test_a_noisy_capacity_is_found_within_its_noise() -> None:
    for seed in range(50):
        rng = random.Random(seed)

        def ask(questions: list[Question[str]], rng: random.Random = rng) -> list[float]:
            return [load / 5.0 * rng.uniform(0.9, 1.1) for _, load in questions]

        ((standing,),) = together([race(["a"], 1.0, stride=8)], ask)
        assert 5.0 * 0.88 < standing.load < 5.0 * 1.12
