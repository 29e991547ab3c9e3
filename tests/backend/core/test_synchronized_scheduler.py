from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.page_pool import PagePool
from backend.core.request import Request, RequestStatus
from backend.core.sampling_params import InvalidRequestError
from backend.core.step import StepPlan, StepResult
from backend.core.synchronized_scheduler import SynchronizedScheduler, SynchronizedSchedulerConfig
from tests.backend.core.fake_steps import make, names, one_each, some_each


def scheduler(size: int = 2, timeout_s: float = 1.0, pages: int = 64) -> SynchronizedScheduler:
    return SynchronizedScheduler(SynchronizedSchedulerConfig(size, timeout_s), PagePool(pages, 4))


def run(s: SynchronizedScheduler, now: float = 0.0) -> tuple[list[str], list[str], list[Request]]:
    """One step in which every request commits one token: prefills, decodes, who left."""
    plan = s.schedule(now)
    assert plan is not None
    return names(plan.prefills), names(plan.decodes), s.update(plan, one_each(plan))


def finish_block(s: SynchronizedScheduler, plan: StepPlan) -> list[Request]:
    left = s.update(plan, StepResult([[(i, 1) for i in range(4)]] * len(plan.prefills)))
    for request in left:
        if not request.status.is_finished:
            request.next_block()
            s.add(request)
    return left


def test_a_full_batch_starts_at_once_and_others_wait_until_its_last_answer() -> None:
    s = scheduler()
    for i, name in enumerate("abc"):
        s.add(make(name, arrival=float(i)))
    assert run(s)[:2] == (["a", "b"], [])
    for _ in range(2):
        assert run(s)[:2] == ([], ["a", "b"])
    assert names(run(s)[2]) == ["a", "b"]
    assert s.num_waiting == 1 and s.schedule(0.5) is None
    assert run(s, 1.0)[:2] == (["c"], [])


def test_an_incomplete_batch_starts_when_its_oldest_has_waited_long_enough() -> None:
    s = scheduler(size=3)
    s.add(make("a"))
    assert s.schedule(10.0) is None
    s.add(make("b", arrival=1.0))
    assert s.schedule(10.9) is None and s.has_work
    assert run(s, 11.0)[0] == ["a", "b"]


def test_time_counts_from_the_first_schedule_for_each_request() -> None:
    s = scheduler(size=2)
    s.add(make("a"))
    assert s.schedule(10.0) is None
    assert s.abort("a") is not None
    s.add(make("b"))
    assert s.schedule(20.0) is None and s.schedule(20.9) is None
    assert run(s, 21.0)[0] == ["b"]


def test_members_next_blocks_stay_in_the_batch_and_move_in_lockstep() -> None:
    s = scheduler()
    s.add(make("a", canvas=8))
    s.add(make("b", canvas=8))
    s.add(make("late", arrival=-1.0))  # older, but the batch below is full without it
    s.abort("late")
    plan = s.schedule()
    assert plan is not None
    # The prefill finishes the block of a alone: it waits for b.
    (a,) = s.update(plan, StepResult([[(i, 1) for i in range(4)], [(0, 1)]]))
    a.next_block()
    s.add(a)
    s.add(make("c", arrival=-2.0))
    for _ in range(2):
        assert run(s) == ([], ["b"], [])
    (b,) = run(s)[2]
    assert s.schedule() is None  # the next block of b is not here yet
    b.next_block()
    s.add(b)
    assert run(s)[:2] == (["a", "b"], [])


def test_a_member_that_ends_early_leaves_its_seat_empty() -> None:
    s = scheduler(timeout_s=0.0)
    s.add(make("short"))
    s.add(make("long", canvas=12))
    s.add(make("next", arrival=1.0))
    for block in range(3):
        plan = s.schedule()
        assert plan is not None
        assert names(plan.prefills) == (["short", "long"] if block == 0 else ["long"])
        finish_block(s, plan)
    assert run(s)[0] == ["next"]


def test_a_member_that_does_not_come_back_is_aborted() -> None:
    s = scheduler()
    for name in "ab":
        s.add(make(name, canvas=8))
    plan = s.schedule()
    assert plan is not None
    a, b = s.update(plan, StepResult([[(i, 1) for i in range(4)]] * 2))
    b.next_block()
    s.add(b)
    assert s.schedule() is None
    assert s.abort("a") is None and s.abort("unknown") is None
    assert run(s)[0] == ["b"]


def test_pages_bound_the_batch_which_then_is_full() -> None:
    s = scheduler(size=3, timeout_s=60.0, pages=11)
    for name in "abc":
        s.add(make(name))  # 4 pages each
    assert run(s)[0] == ["a", "b"]


def test_what_never_fits_is_refused() -> None:
    s = scheduler(pages=3)
    with pytest.raises(InvalidRequestError, match="16 tokens do not fit the KV cache of 12 tokens"):
        s.add(make("a"))
    assert not s.has_work
    with pytest.raises(ValueError, match="batch_size=0"):
        scheduler(size=0)


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(12, 40))
def test_any_mix_ends_with_every_page_free(seed: int, size: int, pages: int) -> None:
    rng = random.Random(seed)
    s = scheduler(size, 1.0, pages)
    live: set[str] = set()
    batch: set[str] = set()
    added, now = 0, 0.0
    while added < 20 or live:
        now += rng.choice((0.0, 0.3, 1.0))
        if added < 20 and rng.random() < 0.4:
            policy = rng.choice(("dual", "none", "prefix", "dkv-decode"))
            s.add(make(str(added), rng.randint(1, 32), rng.choice((4, 8)), float(added), cache_policy=policy))
            live.add(str(added))
            added += 1
        if live and rng.random() < 0.05:
            name = rng.choice(sorted(live))
            request = s.abort(name)
            assert request is not None and request.status is RequestStatus.FINISHED_ABORTED
            live.remove(name)
            batch.discard(name)
        plan = s.schedule(now)
        s.pool.check()
        if plan is None:
            assert not batch  # every member's next block is here: it never waits
            continue
        assert not plan.decodes or all(request.block.step for request in plan.prefills), "in lockstep"
        ran = {*names(plan.prefills), *names(plan.decodes)}
        if batch:
            assert ran <= batch
        else:
            batch = set(ran)
            assert len(batch) <= size
        for request in s.update(plan, some_each(plan, rng)):
            assert request.pages == []
            if request.status.is_finished:
                live.remove(request.request_id)
                batch.remove(request.request_id)
            else:
                request.next_block()
                s.add(request)
        s.pool.check()
    assert s.pool.num_free == pages and not s.has_work and s.waiting_tokens == s.num_waiting == 0
