from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.page_pool import PagePool
from backend.core.prefill_scheduler import PrefillScheduler, PrefillSchedulerConfig
from backend.core.request import Request, RequestStatus
from backend.core.sampling_params import InvalidRequestError
from backend.core.step import StepPlan, StepResult
from tests.backend.core.fake_steps import EOS, make, names, one_each, some_each


def scheduler(limit: int = 40, pages: int = 64) -> PrefillScheduler:
    return PrefillScheduler(PrefillSchedulerConfig(limit), PagePool(pages, 4))


def next_plan(s: PrefillScheduler) -> StepPlan:
    plan = s.schedule()
    assert plan is not None
    return plan


def prefill(s: PrefillScheduler, *requests: Request) -> None:
    """Each of them is held then."""
    for request in requests:
        s.add(request)
    while (plan := s.schedule()) is not None:
        assert s.update(plan, one_each(plan)) == []


def test_whole_prefills_fill_a_step_in_order_of_arrival() -> None:
    s = scheduler(limit=40)
    for name, prompt, arrival in (("c", 20, 3.0), ("a", 12, 1.0), ("b", 12, 2.0), ("d", 1, 4.0)):
        s.add(make(name, prompt, arrival=arrival))
    assert s.waiting_tokens == 61
    assert names(next_plan(s).prefills) == ["a", "b"]  # c would make it 56; d must not overtake c
    assert (s.num_waiting, s.waiting_tokens) == (2, 29)
    assert names(next_plan(s).prefills) == ["c", "d"]
    assert s.schedule() is None


def test_the_first_is_taken_however_large_and_alone() -> None:
    s = scheduler(limit=40)
    s.add(make("huge", 100))
    s.add(make("small", 1, arrival=1.0))
    assert names(next_plan(s).prefills) == ["huge"]
    assert names(next_plan(s).prefills) == ["small"]


def test_kv_is_held_until_it_has_been_read() -> None:
    s = scheduler()
    request = make("a")
    prefill(s, request)
    assert (request.status, len(request.pages)) == (RequestStatus.WAITING_FOR_KV, 4)
    assert (s.num_held, s.pool.num_free, s.has_work, s.schedule()) == (1, 60, True, None)
    assert s.release("a") is request
    assert s.release("a") is None and s.release("unknown") is None
    assert (s.num_held, s.pool.num_free, s.has_work) == (0, 64, False)
    s.pool.check()


def test_what_is_not_prefilled_yet_is_not_released() -> None:
    s = scheduler()
    s.add(make("a"))
    assert s.release("a") is None
    plan = next_plan(s)
    assert s.release("a") is None
    s.update(plan, one_each(plan))
    assert s.release("a") is not None


def test_a_block_that_its_prefill_completes_or_ends_is_not_held() -> None:
    s = scheduler(limit=100)
    for name, canvas in (("whole block", 8), ("end of text", 8), ("goes on", 8), ("fails", 8)):
        s.add(make(name, canvas=canvas))
    plan = next_plan(s)
    commits = [[(i, 1) for i in range(4)], [(0, 1), (1, EOS)], [(0, 1)], []]
    left = s.update(plan, StepResult(commits, {"fails": "boom"}))
    assert names(left) == ["whole block", "end of text", "fails"]
    assert [request.status for request in left] == [
        RequestStatus.PREFILLING, RequestStatus.FINISHED_STOP, RequestStatus.FINISHED_ERROR
    ]  # fmt: skip
    left[0].next_block()
    assert (s.num_held, s.pool.num_free) == (1, 59)


def test_an_abort_frees_what_waits_and_what_is_held() -> None:
    s = scheduler()
    held = make("held")
    prefill(s, held)
    s.add(make("waiting"))
    for name in ("held", "waiting"):
        request = s.abort(name)
        assert request is not None and request.status is RequestStatus.FINISHED_ABORTED
        assert s.abort(name) is None
    assert s.release("held") is None
    assert (s.num_held, s.num_waiting, s.waiting_tokens, s.pool.num_free, s.has_work) == (0, 0, 0, 64, False)


def test_the_head_waits_for_pages_and_those_behind_it_wait_too() -> None:
    s = scheduler(pages=8)
    prefill(s, make("held"))
    s.add(make("large", 20, arrival=1.0))  # 6 pages; 4 are free
    s.add(make("small", 1, arrival=2.0))
    assert s.schedule() is None and s.has_work
    s.release("held")
    assert names(next_plan(s).prefills) == ["large", "small"]
    assert s.pool.num_free == 0


def test_readers_can_be_warned_before_pages_are_free() -> None:
    s = scheduler()
    warned = []

    def before_free(request: Request) -> None:
        assert request.pages and s.pool.num_free < 64
        warned.append(request.request_id)

    s.before_free = before_free
    prefill(s, make("read"), make("aborted"))
    s.add(make("waiting"))
    s.release("read")
    s.abort("aborted")
    s.abort("waiting")  # it has no pages
    assert warned == ["read", "aborted"]


def test_misuse_is_refused() -> None:
    s = scheduler(pages=4)
    s.add(make("a"))
    with pytest.raises(ValueError, match="already scheduled"):
        s.add(make("a"))
    with pytest.raises(InvalidRequestError, match="17 tokens do not fit"):
        s.add(make("b", 13))


@given(st.integers(0, 10**6), st.integers(1, 100), st.integers(12, 40))
def test_any_mix_of_work_ends_with_every_page_free(seed: int, limit: int, pages: int) -> None:
    rng = random.Random(seed)
    s = scheduler(limit, pages)
    live: dict[str, Request] = {}
    added = 0
    while added < 25 or live:
        if added < 25 and rng.random() < 0.6:
            live[str(added)] = make(str(added), rng.randint(1, 40), rng.choice((4, 8)), float(rng.randint(0, 9)))
            s.add(live[str(added)])
            added += 1
        for name, request in list(live.items()):
            if rng.random() < 0.02:
                assert s.abort(name) is request
                del live[name]
            elif request.status is RequestStatus.WAITING_FOR_KV and rng.random() < 0.4:
                assert s.release(name) is request
                del live[name]
        held = [request for request in live.values() if request.status is RequestStatus.WAITING_FOR_KV]
        waiting = sorted(
            (request for request in live.values() if request.status is RequestStatus.WAITING),
            key=lambda request: (request.arrival_time, int(request.request_id)),
        )
        assert s.num_held == len(held) and s.num_waiting == len(waiting)
        assert s.waiting_tokens == sum(request.sequence_length for request in waiting)
        num_free = s.pool.num_free
        plan = s.schedule()
        s.pool.check()
        if plan is None:
            assert not waiting or s.pool.pages_for(waiting[0].sequence_length) > num_free
            continue
        assert plan.prefills == waiting[: len(plan.prefills)] and not plan.decodes
        assert len(plan.prefills) == 1 or sum(request.sequence_length for request in plan.prefills) <= limit
        for request in s.update(plan, some_each(plan, rng)):
            assert request.pages == [] and request is live.pop(request.request_id)
        s.pool.check()
    assert s.pool.num_free == pages and not s.has_work and s.num_held == s.num_waiting == s.waiting_tokens == 0
