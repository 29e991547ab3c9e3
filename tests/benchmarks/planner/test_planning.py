from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.planner.planning import NUM_BOUNDS, SCREENING, Effort, Infeasible, Planner
from benchmarks.planner.search import STEP
from benchmarks.planner.slo import Slo
from benchmarks.planner.space import OVERFLOW_THRESHOLDS, TOKEN_BUDGETS, graph_of, splits
from benchmarks.planner.trial import Point, Trial
from benchmarks.simulator.config import SimulatorConfig
from tests.benchmarks.planner.oracle import BEST_BUDGET, BEST_PREFILL, BEST_THRESHOLD, Cluster, capacity

SLO = Slo.parse("p99<20s")
FINALS = Effort(1000, NUM_BOUNDS)
BASE = SimulatorConfig(token_budget=2048)


def test_the_best_of_all_is_found_with_few_trials() -> None:
    cluster = Cluster(SLO)
    plan = Planner(BASE, SLO, cluster.ask, finals=FINALS).plan(8)
    best = plan.best
    config = best.config
    assert (config.num_prefill, config.num_colocated) == (BEST_PREFILL, 3)
    assert (config.token_budget, config.overflow_threshold) == (BEST_BUDGET, BEST_THRESHOLD)
    assert best.load < capacity(config) <= best.load * STEP * 1.001
    assert best.peak_tokens == round(1000 * best.load), "of loads that meet the objective, the highest"
    assert best.per_gpu == pytest.approx(best.load / 8)
    num_all = len(TOKEN_BUDGETS) * (1 + 7 * len(OVERFLOW_THRESHOLDS)) + 7
    assert plan.num_screened < num_all / 4
    screening = [trial for trial in cluster.asked if trial.seed == 1]
    assert len(screening) < num_all, "less than one short run for each configuration there is"


def test_the_finalists_are_the_best_of_each_graph_on_seeds_that_did_not_choose_them() -> None:
    cluster = Cluster(SLO)
    plan = Planner(BASE, SLO, cluster.ask, finals=FINALS, seed=7, num_seeds=2).plan(8)
    assert {graph_of(each.config) for each in plan.capacities} == {"colocated", "disaggregated", "hybrid"}
    assert [each.load for each in plan.capacities] == sorted((each.load for each in plan.capacities), reverse=True)
    assert {trial.seed for trial in cluster.asked} == {7, 8, 9}
    assert all(trial.config in {each.config for each in plan.capacities} for trial in cluster.asked if trial.seed > 7)
    assert [graph_of(config) for config in plan.curves] == ["hybrid", "colocated", "disaggregated"]
    for points in plan.curves.values():
        assert len(points) == 4 and all(math.isfinite(point.p99_s) for point in points.values())


def test_noise_costs_no_more_than_itself() -> None:
    for seed in range(1, 6):
        plan = Planner(BASE, SLO, Cluster(SLO, noise=0.04).ask, finals=FINALS, seed=seed).plan(8)
        assert capacity(plan.best.config) > 0.9 * 8.8
        assert min(plan.best.loads) <= plan.best.load <= max(plan.best.loads)


def test_the_same_trials_whatever_came_before() -> None:
    one, other = Cluster(SLO, noise=0.04), Cluster(SLO, noise=0.04)
    plans = [Planner(BASE, SLO, cluster.ask, finals=FINALS).plan(8) for cluster in (one, other)]
    assert one.asked == other.asked and plans[0] == plans[1]


def test_an_empty_system_that_is_too_slow_is_infeasible() -> None:
    cluster = Cluster(SLO, lone_s=25.0)
    with pytest.raises(Infeasible) as raised:
        Planner(BASE, SLO, cluster.ask, finals=FINALS).plan(8)
    assert raised.value.point.figures_s == (25.0,)
    assert len(cluster.asked) == 1


def test_so_is_one_where_no_load_is_borne_on_other_seeds() -> None:
    cluster = Cluster(SLO)

    def ask(trials: Sequence[Trial]) -> list[Point]:
        return [replace(p, ratio=2.0) if t.seed > 1 else p for t, p in zip(trials, cluster.ask(trials), strict=True)]

    with pytest.raises(Infeasible):
        Planner(BASE, SLO, ask, finals=FINALS).plan(8)


def test_graphs_that_bear_next_to_nothing_are_left_out() -> None:
    cluster = Cluster(SLO, of=lambda config: capacity(config) if not config.num_prefill else 1e-6)
    plan = Planner(BASE, SLO, cluster.ask, finals=FINALS).plan(8)
    assert {graph_of(each.config) for each in plan.capacities} == {"colocated"}


def test_one_gpu_has_one_graph() -> None:
    plan = Planner(BASE, SLO, Cluster(SLO).ask, finals=FINALS).plan(1)
    assert {(each.config.num_prefill, each.config.num_colocated) for each in plan.capacities} == {(0, 1)}


def test_many_gpus_are_split_in_some_ways() -> None:
    of_64 = splits(BASE, 64, "disaggregated")
    assert len(of_64) == 9 and len(set(of_64)) == 9
    assert all(config.num_prefill + config.num_colocated == 64 for config in of_64)
    assert [config.num_prefill for config in splits(BASE, 3, "hybrid")] == [1, 2]


def test_runs_last_as_long_as_the_objective_asks() -> None:
    assert Effort(100, 3.0).at(1.0, SLO) == 100
    assert Effort(100, 3.0).at(8.0, SLO) == 480
    assert FINALS.at(50.0, SLO) > SCREENING.at(50.0, SLO) > SCREENING.num_requests
