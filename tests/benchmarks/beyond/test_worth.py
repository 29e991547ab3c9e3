from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.beyond import worth
from benchmarks.beyond.ideas import BASELINES, Idea, run
from benchmarks.simulator.result import Result
from benchmarks.simulator.runs import Run

BETTER = Idea("better", {"hand_over_s": 0.0}, needs_prefill=False)


def simulated(runs: Sequence[Run]) -> Sequence[Result]:
    """Latency is exponential in the load; 1.2 times the load without a hand-over."""
    results = []
    for asked in runs:
        load = float(asked.workload.name.split()[-1].removesuffix("/s"))
        mean = math.exp(load / (1.0 if asked.config.hand_over_s else 1.2))
        results.append(SimpleNamespace(latency=SimpleNamespace(mean=mean, p99=3 * mean)))
    return cast(Any, results)


def test_capacity_is_the_load_at_the_baselines_latency() -> None:
    (none, better) = worth.measure(BASELINES[:1], [BETTER], [1, 2], 5, simulated)
    knee = BASELINES[0].knee
    assert none.mean == none.capacity == (1.0, 1.0)
    assert better.capacity == pytest.approx((1.2, 1.2))
    assert better.mean == pytest.approx((math.exp(knee / 1.2 - knee),) * 2)
    assert better.p99 == pytest.approx(better.mean)
    assert "| better | 0.31 | 0.31 | 1.20 |" in worth.markdown([none, better])


def test_ideas_on_prefill_workers_are_not_asked_of_colocated_graphs() -> None:
    needing = Idea("needing", {"hand_over_s": 0.0})
    found = worth.measure(BASELINES[:2], [needing], [1], 5, simulated)
    assert [(of.baseline.num_prefill, of.idea.name) for of in found if of.idea is needing] == [(5, "needing")]


@pytest.mark.parametrize(
    "means, then",
    [
        ({1.0: 5.0}, 1.05),
        ({1.0: 7.0}, 0.95),
        ({1.0: 5.0, 1.05: 7.0}, None),
        ({1.0: 6.0}, None),
        ({worth.LOADS[-1]: 5.0}, None),
        ({worth.LOADS[0]: 7.0}, None),
    ],
)
def test_the_load_goes_to_where_the_target_lies(means: dict[float, float], then: float | None) -> None:
    assert worth.next_load(means, 6.0) == then


def test_a_run_is_the_ideas_switch_on_the_baseline() -> None:
    asked = run(BASELINES[1], BETTER, 0.5, 7, 20)
    assert (asked.config.hand_over_s, asked.config.num_prefill, asked.config.num_colocated) == (0.0, 5, 3)
    assert asked.workload.seed == 7 and len(asked.workload.lengths) == 20
    assert asked.workload.name == f"sharegpt at {BASELINES[1].knee / 2:g}/s"


def test_ranges_are_shown_where_they_are() -> None:
    assert worth.spread([1.0, 3.0, 2.0]) == "2.00 (1.00 to 3.00)"
    assert worth.spread([-math.inf, 12.34, 1.001]) == "1.00 (under 0.7 to 12.3)"
    assert worth.spread([1.001, 1.002]) == "1.00"
