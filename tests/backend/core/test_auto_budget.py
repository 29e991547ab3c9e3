from __future__ import annotations

import math
import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from backend.core.auto_budget import JOINED_TOKENS, LEAST_SAVING, AutoBudget
from backend.core.page_pool import PagePool
from backend.core.request import Request
from backend.core.scheduler import Scheduler, SchedulerConfig
from tests.backend.core.fake_steps import make, names, one_each, some_each

FIXED_S, DECODE_S, PREFILL_S = 0.006, 0.0015, 0.06


def room(_: int) -> bool:
    return True


def none_older(_: int) -> int:
    return 0


def step_s(num_prefills: int, num_decodes: int) -> float:
    return (PREFILL_S * num_prefills or FIXED_S) + DECODE_S * num_decodes


def run(budget: AutoBudget, steps: list[tuple[int, int]], step_s: Callable[[int, int], float]) -> None:
    """Each a (prefills, decodes)."""
    now = 0.0
    for num_prefills, num_decodes in steps:
        budget.at(now)
        now += step_s(num_prefills, num_decodes)
        budget.ran(num_prefills, num_decodes)
    budget.at(now)


def test_a_prefill_waits_for_so_many_older_decodes_and_no_more() -> None:
    budget = AutoBudget(4, lambda _: 3)
    assert budget.admit(96, [2000], room) == 1
    assert AutoBudget(3, lambda _: 3).admit(96, [2000], room) == 0


def test_one_prefill_a_step_and_small_ones_together() -> None:
    budget = AutoBudget(8, none_older)
    assert budget.admit(96, [2000, 10, 10], room) == 1
    assert budget.admit(96, [JOINED_TOKENS - 20, 10, 10, 1], room) == 3
    assert budget.admit(0, [2000, 2000], room) == 1
    assert budget.admit(0, [], room) == 0


def test_those_admitted_in_one_step_count_as_older_to_each_other() -> None:
    assert AutoBudget(3, none_older).admit(0, [10] * 5, room) == 3


def test_no_room_stops_the_scan() -> None:
    assert AutoBudget(8, none_older).admit(0, [10, 10, 10], lambda i: i < 2) == 2


def test_fixed_cost_and_bound_are_learnt_from_steps() -> None:
    budget = AutoBudget(64, none_older)
    rng = random.Random(1)
    steps = [(rng.random() < 0.3, rng.randint(1, 12)) for _ in range(3000)]
    run(budget, steps, step_s)
    assert math.isclose(budget.fixed_s, FIXED_S, rel_tol=1e-6)
    share = FIXED_S * sum(n for _, n in steps) / sum(step_s(p, n) for p, n in steps)
    assert abs(budget.max_older - math.sqrt(share / LEAST_SAVING)) < 1


def test_dear_prefills_leave_fewer_at_once() -> None:
    bounds = []
    for prefill_s in (0.02, 0.06, 0.2):
        budget = AutoBudget(64, none_older)
        steps = [(i % 3 == 0, 1 + i % 8) for i in range(600)]
        run(budget, steps, lambda p, n, prefill_s=prefill_s: (prefill_s * p or FIXED_S) + DECODE_S * n)  # type: ignore[misc]
        bounds.append(budget.max_older)
    assert bounds[0] > bounds[1] > bounds[2] > 1


def test_what_costs_change_to_is_learnt_anew() -> None:
    budget = AutoBudget(64, none_older)
    steps = [(i % 3 == 0, 1 + i % 8) for i in range(5000)]
    run(budget, steps, step_s)
    run(budget, steps, lambda p, n: 2 * step_s(p, n))
    assert math.isclose(budget.fixed_s, 2 * FIXED_S, rel_tol=0.05)


def test_without_a_clock_nothing_is_held_back() -> None:
    budget = AutoBudget(64, none_older)
    run(budget, [(i % 3 == 0, 5) for i in range(50)], lambda p, n: 0.0)
    assert budget.max_older == 64


def test_a_pause_is_no_step() -> None:
    s = Scheduler(SchedulerConfig("auto", 8), PagePool(64, 4))
    now = 0.0
    for _ in range(20):
        s.add(make("a", canvas=8))
        while (plan := s.schedule(now)) is not None:
            now += 0.01
            s.update(plan, one_each(plan))
        now += 100.0
    assert s.auto_budget is not None
    assert math.isclose(s.auto_budget.fixed_s, 0.01)


@given(
    max_num_seqs=st.integers(1, 64),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 64), st.floats(0, 10)), max_size=60),
    waiting=st.lists(st.integers(1, 6000), min_size=1, max_size=4),
)
def test_whatever_was_measured_the_oldest_is_admitted(
    max_num_seqs: int, steps: list[tuple[int, int, float]], waiting: list[int]
) -> None:
    budget = AutoBudget(max_num_seqs, none_older)
    now = 0.0
    for num_prefills, num_decodes, seconds in steps:
        if num_prefills or num_decodes:
            budget.at(now)
            now += seconds
            budget.ran(num_prefills, num_decodes)
    budget.at(now)
    assert 1 <= budget.max_older <= max_num_seqs
    assert budget.fixed_s >= 0
    assert budget.admit(32, waiting, room) >= 1


@given(seed=st.integers(0, 10_000))
def test_decodes_run_in_every_step_and_no_request_starves(seed: int) -> None:
    """New requests keep coming until 200 steps; each leaves after 1 to 4 blocks."""
    rng = random.Random(seed)
    s = Scheduler(SchedulerConfig("auto", rng.randint(1, 8)), PagePool(rng.randint(12, 64), 4))
    now, added, ended = 0.0, 0, 0
    back: list[Request] = []
    for _ in range(3000):
        if added < 60 and rng.random() < 0.3:
            s.add(make(str(added), prompt=rng.randint(1, 32), canvas=4 * rng.randint(1, 4), arrival=now))
            added += 1
        for request in back:
            request.next_block()
            s.add(request)
        denoising = s.num_denoising
        plan = s.schedule(now)
        if plan is None:
            assert not s.has_work
            back = []
            if added == 60:
                break
            now += 0.05
            continue
        assert len(plan.decodes) == denoising
        assert len(plan.prefills) <= 1 or sum(r.sequence_length for r in plan.prefills) <= JOINED_TOKENS
        now += rng.random() * 0.02
        left = s.update(plan, some_each(plan, rng))
        ended += sum(request.status.is_finished for request in left)
        back = [request for request in left if not request.status.is_finished]
        s.pool.check()
    assert ended == added == 60


def test_the_oldest_never_waits_for_younger_ones() -> None:
    s = Scheduler(SchedulerConfig("auto", 8), PagePool(64, 4))
    assert s.auto_budget is not None
    s.auto_budget.max_older = 1
    for number in range(4):
        s.add(make(f"young{number}", canvas=8, arrival=5.0 + number))
    plan = s.schedule()
    assert plan is not None and names(plan.prefills) == ["young0"]
    s.update(plan, one_each(plan))
    s.add(make("old", canvas=8, arrival=1.0))
    plan = s.schedule()
    assert plan is not None
    assert (names(plan.prefills), names(plan.decodes)) == (["old"], ["young0"])


def test_a_refresh_that_holds_pages_does_not_wait() -> None:
    """Others may wait for its pages."""
    s = Scheduler(SchedulerConfig("auto", 8), PagePool(64, 4))
    assert s.auto_budget is not None
    s.add(make("old", arrival=1.0))
    plan = s.schedule()
    assert plan is not None
    s.update(plan, one_each(plan))
    s.add(make("young", arrival=2.0, cache_policy="none"))
    plan = s.schedule()
    assert plan is not None
    s.update(plan, one_each(plan))
    s.auto_budget.max_older = 1
    s.add(make("new", arrival=3.0))
    plan = s.schedule()
    assert plan is not None
    assert (names(plan.prefills), names(plan.decodes)) == (["young"], ["old"])
