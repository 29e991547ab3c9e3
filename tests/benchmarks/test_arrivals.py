from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.arrivals import achieved_rate, bursts, gamma, poisson, replay, within

MANY = 100_000


def gaps(times: Iterator[float]) -> list[float]:
    taken = [0.0, *itertools.islice(times, MANY)]
    return [later - earlier for earlier, later in itertools.pairwise(taken)]


def test_poisson_gaps_are_exponential_up_to_their_tail() -> None:
    drawn = gaps(poisson(20.0, 1))
    assert statistics.fmean(drawn) == pytest.approx(1 / 20, rel=0.01)
    assert statistics.pstdev(drawn) == pytest.approx(1 / 20, rel=0.02)
    for multiple in (0.5, 1.0, 3.0, 5.0):  # clipping at 3 / rate would lose the last
        share = sum(gap > multiple / 20 for gap in drawn) / MANY
        assert share == pytest.approx(math.exp(-multiple), rel=0.12)


def test_the_achieved_rate_is_the_labels_over_a_long_run() -> None:
    assert achieved_rate(within(poisson(20.0, 3), 5000.0), 5000.0) == pytest.approx(20.0, rel=0.01)


def test_counts_of_poisson_arrivals_vary_as_much_as_their_mean() -> None:
    counts = [len(within(poisson(10.0, seed), 10.0)) for seed in range(400)]
    assert statistics.fmean(counts) == pytest.approx(100, rel=0.02)
    assert statistics.variance(counts) == pytest.approx(100, rel=0.25)


def test_one_seed_is_one_pattern_at_every_rate() -> None:
    slow, fast = within(poisson(1.0, 7), 40.0), within(poisson(4.0, 7), 10.0)
    assert slow == pytest.approx([4 * time for time in fast])
    assert slow != within(poisson(1.0, 8), 40.0)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_gaps_have_their_coefficient_of_variation(cv: float) -> None:
    drawn = gaps(gamma(5.0, cv, 1))
    assert statistics.fmean(drawn) == pytest.approx(1 / 5, rel=0.03)
    assert statistics.pstdev(drawn) / statistics.fmean(drawn) == pytest.approx(cv, rel=0.03)


def test_bursts_come_together_at_the_mean_rate() -> None:
    times = within(bursts(20.0, 8, 1), 2000.0)
    assert achieved_rate(times, 2000.0) == pytest.approx(20.0, rel=0.05)
    assert all(len(list(group)) == 8 for _, group in itertools.groupby(times))


def test_replay_starts_at_zero_and_can_be_stretched(tmp_path: Path) -> None:
    file = tmp_path / "arrivals.csv"
    file.write_text("arrival_s,tokens\n10,1\n11,1\n14,1\n")
    assert replay(file) == [0.0, 1.0, 4.0]
    assert replay(file, rate=4.0) == [0.0, 0.125, 0.5]


@pytest.mark.parametrize(
    "text",
    [
        "Date,Time\n3,10\n3,11.5\n",
        "arrival_time,x\n2023-11-16 18:15:46.500,1\n2023-11-16 18:15:48,1\n",
    ],
)
def test_arrivals_of_the_papers_prototype_are_read(tmp_path: Path, text: str) -> None:
    file = tmp_path / "arrivals.csv"
    file.write_text(text)
    assert replay(file) == [0.0, 1.5]


@pytest.mark.parametrize("text", ["", "time\n1\n2\n", "arrival_s\n1\n", "arrival_s\n2\n1\n", "arrival_s\n1\nx\n"])
def test_a_file_without_arrivals_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "arrivals.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match="arrival_s"):
        replay(file)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        next(poisson(rate, 1))
