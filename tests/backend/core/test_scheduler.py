from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.cache_policy import CACHE_POLICIES
from backend.core.logprobs import TokenLogprobs
from backend.core.page_pool import PagePool
from backend.core.queries import num_query_tokens
from backend.core.request import Request, RequestStatus
from backend.core.sampling_params import InvalidRequestError
from backend.core.scheduler import Scheduler, SchedulerConfig
from backend.core.step import StepPlan, StepResult
from tests.backend.core.fake_steps import EOS, make, names, one_each, some_each


def scheduler(tau: int = 100, seqs: int = 8, pages: int = 64) -> Scheduler:
    return Scheduler(SchedulerConfig(tau, seqs), PagePool(pages, 4))


def next_plan(s: Scheduler) -> StepPlan:
    plan = s.schedule()
    assert plan is not None
    return plan


def test_prefills_run_in_order_of_arrival_not_of_coming_here() -> None:
    s = scheduler(tau=40)
    for name, arrival in (("late", 3.0), ("early", 1.0), ("middle", 2.0)):
        s.add(make(name, arrival=arrival))
    plan = s.schedule()
    assert plan is not None
    assert names(plan.prefills) == ["early", "middle"]


def test_decodes_run_in_every_step_and_prefills_within_the_budget() -> None:
    s = scheduler(tau=20)
    s.add(make("a"))
    plan = s.schedule()
    assert plan is not None
    s.update(plan, one_each(plan))
    s.add(make("b", prompt=21, arrival=1.0))
    plan = s.schedule()
    assert plan is not None
    assert (names(plan.prefills), names(plan.decodes)) == ([], ["a"])
    assert s.budget.deficit == 20  # 4 left over by the first step, 16 earned by this one
    s.update(plan, one_each(plan))
    plan = s.schedule()
    assert plan is not None
    assert (names(plan.prefills), names(plan.decodes)) == (["b"], ["a"])
    assert s.budget.deficit == 11


def test_seats_and_pages_bound_what_is_admitted() -> None:
    s = scheduler(seqs=1)
    s.add(make("a"))
    s.add(make("b", arrival=1.0))
    plan = s.schedule()
    assert plan is not None and names(plan.prefills) == ["a"]
    s = scheduler(pages=7)
    s.add(make("a"))
    s.add(make("b", arrival=1.0))
    plan = s.schedule()
    assert plan is not None and names(plan.prefills) == ["a"]
    assert s.pool.num_free == 3


def test_with_one_seat_requests_run_one_after_the_other() -> None:
    s = scheduler(seqs=1)
    for i, name in enumerate("abc"):
        s.add(make(name, canvas=8, arrival=float(i)))
    order: list[str] = []
    while s.has_work:
        plan = next_plan(s)
        order += names((*plan.prefills, *plan.decodes))
        for request in s.update(plan, one_each(plan)):
            if not request.status.is_finished:
                request.next_block()
                s.add(request)
    assert "".join(order) == 8 * "a" + 8 * "b" + 8 * "c"


def test_what_never_fits_is_refused() -> None:
    s = scheduler(pages=3)
    with pytest.raises(InvalidRequestError, match="16 tokens do not fit the KV cache of 12 tokens"):
        s.add(make("a"))
    assert not s.has_work and s.schedule() is None


def test_the_same_request_twice_is_a_mistake() -> None:
    s = scheduler()
    s.add(make("a"))
    with pytest.raises(ValueError, match="already scheduled"):
        s.add(make("a"))


def test_a_prefill_that_finishes_the_block_never_decodes() -> None:
    s = scheduler()
    s.add(make("a", canvas=8))
    plan = s.schedule()
    assert plan is not None
    (request,) = s.update(plan, StepResult([[(i, 1) for i in range(4)]]))
    assert not request.status.is_finished and request.block.num_masked == 0
    assert not s.has_work and s.pool.num_free == 64
    request.next_block()
    s.add(request)
    plan = s.schedule()
    assert plan is not None
    (request,) = s.update(plan, StepResult([[(0, 1), (1, EOS)]]))
    assert request.status is RequestStatus.FINISHED_STOP
    assert request.answer() == ([1] * 5, RequestStatus.FINISHED_STOP)


def test_an_error_ends_one_request_and_leaves_the_others() -> None:
    s = scheduler()
    for name in "ab":
        s.add(make(name))
    plan = s.schedule()
    assert plan is not None
    (failed,) = s.update(plan, StepResult([[], [(0, 1)]], {"a": "boom"}))
    assert (failed.request_id, failed.status, failed.error) == ("a", RequestStatus.FINISHED_ERROR, "boom")
    s.pool.check()
    plan = s.schedule()
    assert plan is not None and names(plan.decodes) == ["b"]


def test_a_block_that_is_never_done_fails_and_leaves_the_others() -> None:
    s = scheduler()
    s.add(make("stuck"))
    limit = 2 * 4 + 1
    for _ in range(limit - 1):
        plan = next_plan(s)
        assert s.update(plan, StepResult([[]])) == []
    s.add(make("fresh"))
    plan = next_plan(s)
    assert s.update(plan, StepResult([[], []]))[0].error == "block 0 still has 4 masks after 9 steps"
    assert names(next_plan(s).decodes) == ["fresh"]
    s.pool.check()


def from_elsewhere(name: str, prompt: int = 12, arrival: float = 0.0) -> Request:
    """Its prefill has committed the first token."""
    return make(name, prompt, arrival=arrival, prefilled=[(0, 1)])


def test_a_block_prefilled_elsewhere_is_denoised_once_its_kv_is_here() -> None:
    s = scheduler()
    s.add(from_elsewhere("a"))
    assert (s.num_transferring, s.waiting_tokens, s.schedule()) == (1, 0, None)
    (request,) = s.start_transfers()
    assert (request.status, len(request.pages), s.pool.num_free) == (RequestStatus.TRANSFERRING, 4, 60)
    assert s.start_transfers() == [] and s.schedule() is None and s.num_transferring == 1
    assert s.transfer_ended("a", True) is request
    for _ in range(3):
        plan = next_plan(s)
        assert (names(plan.prefills), names(plan.decodes)) == ([], ["a"])
        left = s.update(plan, one_each(plan))
    assert left == [request] and request.answer() == ([1] * 4, RequestStatus.FINISHED_LENGTH)
    assert s.pool.num_free == 64 and not s.has_work


def test_blocks_that_are_handed_over_without_end_do_not_starve_a_prefill() -> None:
    s = scheduler(tau=8, seqs=4)
    s.add(make("waits"))
    added = 0
    for _ in range(16):  # 16 tokens, of which each step earns one
        while s.num_transferring + len(s._denoising) < 3:
            added += 1
            s.add(from_elsewhere(f"{added}", arrival=1.0))
        for request in s.start_transfers():
            s.transfer_ended(request.request_id, True)
        plan = next_plan(s)
        assert len(plan.decodes) == 3, "12 tokens in every step"
        s.update(plan, one_each(plan))
    assert names(plan.prefills) == ["waits"]


def test_transfers_start_in_order_of_arrival_as_pages_and_seats_come_free() -> None:
    s = scheduler(pages=9)
    for name, arrival in (("late", 3.0), ("early", 1.0), ("middle", 2.0)):
        s.add(from_elsewhere(name, arrival=arrival))
    assert names(s.start_transfers()) == ["early", "middle"]
    s.transfer_ended("middle", False)
    assert names(s.start_transfers()) == ["late"]
    s = scheduler(seqs=2)
    for name in "abc":
        s.add(from_elsewhere(name))
    assert names(s.start_transfers()) == ["a", "b"]
    s.transfer_ended("a", True)
    assert s.start_transfers() == []  # it is denoised: its seat is taken still
    s.abort("a")
    assert names(s.start_transfers()) == ["c"]


def test_what_waits_for_kv_has_the_first_claim_on_pages() -> None:
    s = scheduler(tau=20, pages=12)
    s.add(make("decoding"))
    plan = next_plan(s)
    s.update(plan, one_each(plan))
    s.add(make("local", arrival=1.0))
    s.add(from_elsewhere("large", prompt=40, arrival=2.0))  # 11 pages; 8 are free
    for _ in range(2):
        assert s.start_transfers() == []
        plan = next_plan(s)
        assert (names(plan.prefills), names(plan.decodes)) == ([], ["decoding"])
        assert s.budget.deficit == 4  # of the first step: a step stopped by memory earns nothing
        s.update(plan, one_each(plan))
    s.abort("decoding")
    assert names(s.start_transfers()) == ["large"]
    assert s.schedule() is None
    s.transfer_ended("large", False)
    assert names(next_plan(s).prefills) == ["local"]


def test_transfers_take_seats_from_local_prefills_and_the_other_way_round() -> None:
    s = scheduler(seqs=2)
    s.add(from_elsewhere("a"))
    s.start_transfers()
    for name in "bc":
        s.add(make(name))
    plan = next_plan(s)
    assert names(plan.prefills) == ["b"]
    s.update(plan, one_each(plan))
    s.add(from_elsewhere("d"))
    assert s.start_transfers() == []


@pytest.mark.parametrize("arrived", [True, False])
def test_pages_that_kv_is_read_into_stay_taken_after_an_abort(arrived: bool) -> None:
    s = scheduler()
    s.add(from_elsewhere("waits"))
    s.add(from_elsewhere("moves"))
    s.abort("waits")
    (request,) = s.start_transfers()
    assert s.abort("moves") is request and s.abort("moves") is None
    assert (request.status, s.pool.num_free, s.has_work) == (RequestStatus.FINISHED_ABORTED, 60, False)
    with pytest.raises(ValueError, match="already scheduled"):
        s.add(from_elsewhere("moves"))  # its pages are not all its own yet
    assert s.transfer_ended("moves", arrived) is None
    assert (s.pool.num_free, s.num_transferring) == (64, 0)
    s.pool.check()
    s.add(from_elsewhere("moves"))


def test_a_failed_transfer_leaves_to_be_prefilled_again() -> None:
    s = scheduler()
    s.add(from_elsewhere("a"))
    s.start_transfers()
    request = s.transfer_ended("a", False)
    assert request is not None and not request.status.is_finished and request.pages == []
    assert not s.has_work and s.pool.num_free == 64
    request.retry_block(request.block.committed_prefix())
    s.add(request)
    assert names(next_plan(s).prefills) == ["a"]


def test_kv_that_can_never_fit_is_refused() -> None:
    s = scheduler(pages=3)
    with pytest.raises(InvalidRequestError, match="16 tokens do not fit"):
        s.add(from_elsewhere("a"))
    assert s.num_transferring == 0


def test_a_refresh_waits_for_the_budget_and_keeps_its_pages_and_seat() -> None:
    s = scheduler(tau=20, seqs=2)
    s.add(make("a", cache_policy="none"))
    s.add(make("b", arrival=1.0))
    s.update(plan := next_plan(s), one_each(plan))
    assert names(plan.prefills) == ["a"]
    s.update(plan := next_plan(s), one_each(plan))
    assert names(plan.prefills) == ["a"] and s.budget.deficit == 8  # 4 of the first step; b's 16 do not fit
    s.update(plan := next_plan(s), one_each(plan))
    assert (names(plan.prefills), s.num_waiting, s.pool.num_free) == (["a"], 2, 64 - 4)
    (request,) = s.update(plan := next_plan(s), one_each(plan))
    assert names(plan.prefills) == ["a", "b"], "the budget carried forward has grown to both"
    assert request.block.step == 4 and s.num_denoising == 1 and s.pool.num_free == 64 - 4


def test_a_refresh_goes_ahead_of_older_requests_that_wait_for_its_pages() -> None:
    """Or nobody would ever move."""
    s = scheduler(pages=5)
    s.add(make("young", arrival=1.0, cache_policy="none"))
    s.update(plan := next_plan(s), one_each(plan))
    s.add(make("old", arrival=0.0))
    for _ in range(3):
        assert names((plan := next_plan(s)).prefills) == ["young"]
        s.update(plan, one_each(plan))
    assert names(next_plan(s).prefills) == ["old"]


def test_a_refresh_does_not_wait_for_room_that_kv_from_elsewhere_claims() -> None:
    s = scheduler(pages=5)
    s.add(make("a", cache_policy="none"))
    s.update(plan := next_plan(s), one_each(plan))
    s.add(from_elsewhere("b"))
    assert s.start_transfers() == [] and names(next_plan(s).prefills) == ["a"]


def test_a_block_that_came_with_its_kv_may_begin_with_a_refresh() -> None:
    s = scheduler()
    s.add(make("a", prefilled=[(0, 1)], cache_policy="none"))
    s.start_transfers()
    s.transfer_ended("a", True)
    plan = next_plan(s)
    assert (names(plan.prefills), s.num_waiting, s.pool.num_free) == (["a"], 0, 60)
    assert s.abort("a") is not None and s.pool.num_free == 60, "the step still writes them"
    s.update(plan, one_each(plan))
    assert s.pool.num_free == 64


def test_doubtful_tokens_are_taken_back_once_and_nothing_is_final_before() -> None:
    s = scheduler()
    s.add(make("a", remask_below=0.5))
    sure, doubtful = TokenLogprobs(math.log(0.9)), TokenLogprobs(math.log(0.1))
    commits = [(0, 1), (1, 2), (2, 3), (3, 4)]
    plan = next_plan(s)
    assert s.update(plan, StepResult([commits], logprobs={"a": [sure, doubtful, sure, doubtful]})) == []
    (request,) = (plan := next_plan(s)).decodes
    assert request.block.tokens == [1, None, 3, None] and request.block.frontier == 0
    assert s.update(plan, StepResult([[(1, 7)]], logprobs={"a": [doubtful]})) == []
    assert request.block.frontier == 0 and request.answer() == ([], None)
    (left,) = s.update(plan := next_plan(s), StepResult([[(3, 8)]], logprobs={"a": [doubtful]}))
    assert left is request and request.answer() == ([1, 7, 3, 8], RequestStatus.FINISHED_LENGTH)
    assert request.block.step == 3 and s.pool.num_free == 64


def test_doubtful_tokens_of_a_prefill_elsewhere_are_taken_back_where_the_block_is_denoised() -> None:
    s = scheduler()
    sure, doubtful = TokenLogprobs(math.log(0.9)), TokenLogprobs(math.log(0.1))
    commits = [(0, 1), (1, 2), (2, 3), (3, 4)]
    logprobs = [sure, sure, doubtful, sure]
    s.add(make("a", prefilled=commits, prefilled_logprobs=logprobs, remask_below=0.5))
    s.start_transfers()
    s.transfer_ended("a", True)
    (request,) = next_plan(s).decodes
    assert request.block.tokens == [1, 2, None, 4] and request.block.step == 1


@given(st.integers(0, 10**6), st.integers(20, 200), st.integers(1, 6), st.integers(12, 40))
def test_any_mix_of_work_ends_with_every_page_free(seed: int, tau: int, seqs: int, pages: int) -> None:
    """Blocks to be prefilled here and elsewhere, transfers that end in any order and way, ends of text,
    errors and aborts in random order; nothing is lost or starved."""
    rng = random.Random(seed)
    s = scheduler(tau, seqs, pages)
    live: set[str] = set()
    moving: dict[str, Request] = {}
    added = ended = 0

    def end(request: Request) -> None:
        nonlocal ended
        live.remove(request.request_id)
        ended += 1

    while added < 20 or live or moving:
        if added < 20 and rng.random() < 0.4:
            is_remote = rng.random() < 0.5
            size = rng.randint(1, 40 - 8)
            policy = rng.choice(list(CACHE_POLICIES))
            request = make(
                str(added), size, rng.choice((4, 8)), float(added), prefilled=[(0, 1)] if is_remote else None,
                cache_policy=policy, unmasking="random" if policy == "dkv-greedy" else "threshold",
                cache_refresh_interval=rng.choice((None, 0, 2)),
            )  # fmt: skip
            s.add(request)
            live.add(str(added))
            added += 1
        if live and rng.random() < 0.05:
            aborted = s.abort(rng.choice(sorted(live)))
            assert aborted is not None and aborted.status is RequestStatus.FINISHED_ABORTED
            end(aborted)
        assert s.abort("unknown") is None
        for request in s.start_transfers():
            assert request.status is RequestStatus.TRANSFERRING and request.pages
            moving[request.request_id] = request
        s.pool.check()
        assert {r.request_id for r in moving.values() if r.pages} == set(moving)
        if moving and rng.random() < 0.5:
            request = moving.pop(rng.choice(sorted(moving)))
            arrived = rng.random() < 0.8
            was_aborted = request.status.is_finished
            assert s.transfer_ended(request.request_id, arrived) is (None if was_aborted else request)
            if not was_aborted and not arrived:
                request.retry_block(request.block.committed_prefix())
                s.add(request)
        decoding, has_kv_waiting = s.num_denoising, s.num_transferring > len(moving)
        plan = s.schedule()
        s.pool.check()
        if plan is None:
            assert not live or s.num_transferring
            continue
        assert len(plan.decodes) == decoding
        assert len(plan.decodes) + len(plan.prefills) + len(moving) <= seqs
        assert not (has_kv_waiting and any(request.block.step == 0 for request in plan.prefills))
        assert plan.decode_tokens == sum(num_query_tokens(request, 0) for request in plan.decodes)
        for request in s.update(plan, some_each(plan, rng)):
            assert request.pages == []
            if request.status.is_finished:
                end(request)
            else:
                request.next_block()
                s.add(request)
        s.pool.check()
    assert ended == 20
    assert s.pool.num_free == pages and not s.has_work and s.schedule() is None and s.waiting_tokens == 0
