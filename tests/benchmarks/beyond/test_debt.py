from __future__ import annotations

import random

from backend.core.budget import TokenBudget
from backend.core.scheduler import Scheduler
from benchmarks.beyond.debt import Debt, DebtBudget
from benchmarks.simulator.config import calibrated
from benchmarks.simulator.graph import Graph
from benchmarks.simulator.runs import Run
from benchmarks.simulator.simulate import simulate
from benchmarks.simulator.workload import draw


def yes(index: int) -> bool:
    return True


def test_without_debt_it_is_algorithm_1() -> None:
    rng = random.Random(1)
    paper, ours = TokenBudget(1024), DebtBudget(1024, 0)
    for _ in range(2000):
        decode_tokens = 32 * rng.randrange(50)
        waiting = [rng.randrange(1, 4000) for _ in range(rng.randrange(4))]
        has_room = [rng.random() < 0.8 for _ in waiting]
        admitted = [budget.admit(decode_tokens, waiting, has_room.__getitem__) for budget in (paper, ours)]
        assert admitted[0] == admitted[1] and paper.deficit == ours.deficit


def test_an_idle_steps_oversized_prefill_is_paid_back() -> None:
    paper, ours = TokenBudget(1000), DebtBudget(1000, 4000)
    assert [budget.admit(0, [3000], yes) for budget in (paper, ours)] == [1, 1]
    assert (paper.deficit, ours.deficit) == (0, -2000)
    assert paper.admit(100, [900], yes) == 1
    assert ours.admit(100, [], yes) == 0 and ours.deficit == -1100, "steps without a waiting prefill pay, too"
    assert [ours.admit(100, [900], yes) for _ in range(3)] == [0, 0, 1]


def test_debt_is_bounded() -> None:
    ours = DebtBudget(1000, 500)
    ours.admit(0, [3000], yes)
    assert ours.deficit == -500
    ours.admit(5000, [], yes)
    assert ours.deficit == -500


def test_every_colocated_worker_gets_its_budget() -> None:
    graphs: list[Graph] = []

    def make_graph(*args: object) -> Graph:
        graphs.append(Debt(2)(*args))
        return graphs[-1]

    run = Run(calibrated("llada-8b", "sharegpt", num_prefill=1, num_colocated=2), draw("sharegpt", 5, 1, qps=1.0))
    simulate(run.config, run.workload, make_graph=make_graph)
    budgets = [worker.scheduler.budget for worker in graphs[0].workers if isinstance(worker.scheduler, Scheduler)]
    assert [(type(budget), getattr(budget, "max_debt", 0)) for budget in budgets] == [(DebtBudget, 2048)] * 2
