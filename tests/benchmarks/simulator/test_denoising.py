from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.simulator.denoising import END_OF_TEXT, Lognormal, Recorded, commits_of


@pytest.mark.parametrize("mean", [2.0, 15.9, 25.8])
def test_the_mean_is_what_it_says_after_clipping(mean: float) -> None:
    drawn = [steps for index in range(20_000) for steps in Lognormal(mean).draw(1, index, 2, 32)]
    assert {min(drawn), max(drawn)} <= set(range(1, 33))
    assert fmean(drawn) == pytest.approx(mean, rel=0.01)


def test_without_spread_every_block_takes_the_same() -> None:
    assert set(Lognormal(8.0, 0.0, 0.0).draw(1, 0, 50, 32)) == {8}


def test_a_mean_that_no_block_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="between 1 and 32"):
        Lognormal(33.0).draw(1, 0, 1, 32)


def test_draws_depend_on_seed_request_and_block_alone() -> None:
    model = Lognormal(16.0)
    few, many = model.draw(1, 7, 3, 32), model.draw(1, 7, 9, 32)
    assert many[:3] == few
    assert len({tuple(model.draw(seed, index, 9, 32)) for seed in (1, 2) for index in range(5)}) == 10


def test_recorded_forwards_are_replayed_request_by_request(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("request,num_steps\na,3\na,40\nb,5\n")
    model = Recorded(path)
    drawn = {tuple(model.draw(1, index, 3, 32)) for index in range(20)}
    assert drawn == {(3, 32, 3), (5, 5, 5)}
    assert model.draw(1, 4, 3, 32) == Recorded(path).draw(1, 4, 3, 32)
    path.write_text("request,num_steps\na,0\n")
    with pytest.raises(ValueError, match="positive"):
        Recorded(path)


@pytest.mark.parametrize("num_steps", [1, 5, 31, 32])
def test_every_position_is_committed_once(num_steps: int) -> None:
    steps = commits_of(num_steps, 32, 9)
    assert len(steps) == num_steps and all(steps)
    pairs = [pair for step in steps for pair in step]
    assert [offset for offset, _ in pairs] == list(range(32))
    assert [offset for offset, token in pairs if token == END_OF_TEXT] == [9]
