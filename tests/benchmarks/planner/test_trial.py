from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planner.slo import Slo
from benchmarks.planner.trial import Demand, Point, Trial, Trials, measure
from benchmarks.simulator.config import calibrated
from benchmarks.simulator.simulate import simulate
from benchmarks.simulator.workload import draw

CONFIG = calibrated("llada-8b", "sharegpt", num_colocated=2)
DEMAND = Demand("sharegpt", Slo.parse("p99<30s,mean<8s"))
TRIAL = Trial(CONFIG, load=1.0, seed=3, num_requests=30)


def test_a_trial_is_the_simulators_run() -> None:
    result = simulate(CONFIG, draw("sharegpt", 30, 3, qps=1.0))
    point = measure(DEMAND, TRIAL)
    assert (point.mean_s, point.p99_s) == (result.latency.mean, result.latency.p99)
    assert point.figures_s == (point.p99_s, point.mean_s)
    assert point.ratio == max(point.p99_s / 30, point.mean_s / 8)
    assert point == measure(DEMAND, replace(TRIAL, may_stop=False))


def test_tokens_in_flight_are_counted_at_their_peak() -> None:
    at_once = measure(DEMAND, replace(TRIAL, load=1e6, may_stop=False))
    one_by_one = measure(DEMAND, replace(TRIAL, load=1e-6, may_stop=False))
    sizes = [length.num_prompt_tokens + 1024 for length in draw("sharegpt", 30, 3).lengths]
    assert (at_once.peak_tokens, one_by_one.peak_tokens) == (sum(sizes), max(sizes))


def test_a_hopeless_run_is_stopped_and_only_when_it_may_be() -> None:
    overload = replace(TRIAL, load=100.0)
    whole = measure(DEMAND, replace(overload, may_stop=False))
    assert whole.ratio > 1 and math.isfinite(whole.p99_s)
    assert measure(DEMAND, overload) == Point()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_trials_are_answered_in_order_and_each_runs_once(num_processes: int) -> None:
    measured: list[None] = []
    with Trials(DEMAND, num_processes, lambda: measured.append(None)) as trials:
        other = replace(TRIAL, seed=4)
        points = trials.ask([TRIAL, other, TRIAL])
        assert points == [measure(DEMAND, TRIAL), measure(DEMAND, other), points[0]]
        assert trials.ask([replace(TRIAL, may_stop=False)]) == [points[0]]
        assert len(measured) == 2
        stopped = replace(TRIAL, load=100.0)
        assert trials.ask([stopped]) == [Point()]
        assert np.isfinite(trials.ask([replace(stopped, may_stop=False)])[0].ratio), "a stopped run answers no other"


def test_what_cannot_be_run_is_raised(tmp_path: Path) -> None:
    with Trials(DEMAND, 1) as trials, pytest.raises(ValueError, match="do not fit"):
        trials.ask([replace(TRIAL, config=replace(CONFIG, kv_cache_tokens=64))])
    with pytest.raises(OSError):
        Demand(str(tmp_path / "none.csv"), DEMAND.slo).workload(1, 1, 1.0)
