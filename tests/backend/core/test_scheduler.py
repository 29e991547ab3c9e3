from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.page_pool import PagePool
from backend.core.request import Request, RequestStatus
from backend.core.sampling_params import InvalidRequestError, SamplingParams
from backend.core.scheduler import Scheduler, SchedulerConfig
from backend.core.step import StepPlan, StepResult

BLOCK = 4
EOS = 9


def make(name: str, prompt: int = 12, canvas: int = 4, arrival: float = 0.0) -> Request:
    params = SamplingParams(
        max_tokens=canvas, canvas_length=canvas, block_length=BLOCK, steps_per_block=1, stop_token_ids=(EOS,)
    )
    return Request(name, [0] * prompt, params, arrival)


def scheduler(tau: int = 100, seqs: int = 8, pages: int = 64) -> Scheduler:
    return Scheduler(SchedulerConfig(tau, seqs), PagePool(pages, 4))


def one_each(plan: StepPlan) -> StepResult:
    """Every request commits its leftmost masked position."""
    return StepResult([[(r.block.tokens.index(None), 1)] for r in (*plan.prefills, *plan.decodes)])


def names(requests: object) -> list[str]:
    return [r.request_id for r in requests]  # type: ignore[attr-defined]


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
    assert (failed.request_id, failed.status) == ("a", RequestStatus.FINISHED_ERROR)
    s.pool.check()
    plan = s.schedule()
    assert plan is not None and names(plan.decodes) == ["b"]


@given(st.integers(0, 10**6), st.integers(20, 200), st.integers(1, 6), st.integers(12, 40))
def test_any_mix_of_work_ends_with_every_page_free(seed: int, tau: int, seqs: int, pages: int) -> None:
    """Arrivals, commits, ends of text, errors and aborts in random order; nothing is lost or starved."""
    rng = random.Random(seed)
    s = scheduler(tau, seqs, pages)
    live: set[str] = set()
    added = ended = idle = 0
    while added < 20 or live:
        if added < 20 and rng.random() < 0.4:
            s.add(make(str(added), rng.randint(1, 40 - 8), rng.choice((4, 8)), float(added)))
            live.add(str(added))
            added += 1
        if live and rng.random() < 0.05:
            name = rng.choice(sorted(live))
            aborted = s.abort(name)
            assert aborted is not None and aborted.status is RequestStatus.FINISHED_ABORTED
            live.remove(name)
            ended += 1
        assert s.abort("unknown") is None
        decoding = s.num_denoising
        plan = s.schedule()
        s.pool.check()
        if plan is None:
            assert not s.has_work
            idle += 1
            continue
        assert len(plan.decodes) == decoding
        assert len(plan.decodes) + len(plan.prefills) <= seqs
        commits, errors = [], {}
        for request in (*plan.prefills, *plan.decodes):
            masked = [i for i, token in enumerate(request.block.tokens) if token is None]
            chosen = rng.sample(masked, rng.randint(1, len(masked)))
            commits.append([(i, EOS if rng.random() < 0.05 else 1) for i in chosen])
            if rng.random() < 0.02:
                errors[request.request_id] = "broken"
        for request in s.update(plan, StepResult(commits, errors)):
            assert request.pages == []
            if request.status.is_finished:
                live.remove(request.request_id)
                ended += 1
            else:
                request.next_block()
                s.add(request)
        s.pool.check()
    assert ended == 20
    assert s.pool.num_free == pages and not s.has_work and s.schedule() is None
