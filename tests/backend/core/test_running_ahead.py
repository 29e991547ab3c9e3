"""The next step is scheduled before the result of the one before is known."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.block import Block
from backend.core.logprobs import TokenLogprobs
from backend.core.page_pool import PagePool
from backend.core.queries import is_steady
from backend.core.request import Request, RequestStatus
from backend.core.scheduler import Scheduler, SchedulerConfig
from backend.core.step import StepPlan, StepResult
from tests.backend.core.fake_steps import EOS, make, names, one_each

Arrival = tuple[int, dict[str, Any], bool]
"""The turn, the request's options, and whether it was prefilled elsewhere."""


class Device:
    """Runs plans in order, and knows what it has committed before the scheduler does.

    What a step commits depends on the request, its block and the step alone.
    """

    def __init__(self) -> None:
        self.blocks: dict[Block, tuple[set[int], int]] = {}
        self.num_steps: dict[str, int] = {}

    def launch(self, plan: StepPlan) -> StepResult:
        commits, errors, logprobs = [], {}, {}
        for request in (*plan.prefills, *plan.decodes):
            assert request.pages, "a step needs its pages"
            block = request.block
            masked, step = self.blocks.get(block, ({i for i, t in enumerate(block.tokens) if t is None}, block.step))
            assert is_plain(request) or step == block.step, "it does not know what its last step committed"
            commits.append(self._commits(request, masked, step))
            rng = _rng(request, step)
            logprobs[request.request_id] = [TokenLogprobs(-2 * rng.random()) for _ in commits[-1]]
            if commits[-1]:
                self.num_steps[request.request_id] = self.num_steps.get(request.request_id, 0) + 1
            left = masked - {offset for offset, _ in commits[-1]}
            self.blocks[request.block] = (left, step + 1)
            if _rng(request, step).random() < 0.02:
                errors[request.request_id] = "broken"
        return StepResult(commits, errors, logprobs)

    def _commits(self, request: Request, masked: set[int], step: int) -> list[tuple[int, int]]:
        rng = _rng(request, step)
        chosen = rng.sample(sorted(masked), min(len(masked), rng.choice((1, 1, 1, 2, 4))))
        return [(offset, EOS if rng.random() < 0.03 else rng.randrange(8)) for offset in chosen]


def _rng(request: Request, step: int) -> Random:
    return Random(f"{request.request_id} {request.block.index} {step}")


def is_plain(request: Request) -> bool:
    """The host chooses the tokens of one in five, of those whose steps are all alike."""
    return is_steady(request) and not request.request_id.endswith(("4", "9"))


def run(
    depth: int,
    tau: int,
    pages: int,
    seqs: int,
    arrivals: list[Arrival],
    aborts: set[int],
    ahead: list[int] | None = None,
) -> dict[str, object]:
    """All requests from arrival to end; what became of each, without those that were aborted.

    Args:
        ahead: filled with the number of odd requests that are there when a step is scheduled while one runs.
    """
    scheduler = Scheduler(SchedulerConfig(tau, seqs), PagePool(pages, 4), is_plain=is_plain)
    device = Device()
    reading: list[tuple[int, Request]] = []
    running: deque[tuple[StepPlan, StepResult, list[int]]] = deque()
    requests: list[Request] = []
    ended: dict[str, object] = {}
    turn = 0
    while turn < 20 or scheduler.has_work or running or reading:
        for at, (when, options, is_prefilled) in enumerate(arrivals):
            if when == turn:
                prefilled = [(1, 1)] if is_prefilled else None
                request = make(
                    f"r{at}", prompt=4 + at % 9, canvas=12, arrival=float(at), prefilled=prefilled, **options
                )
                requests.append(request)
                scheduler.add(request)
        for when, request in [entry for entry in reading if entry[0] <= turn]:
            reading.remove((when, request))
            scheduler.transfer_ended(request.request_id, arrived=True)
        reading += [(turn + 2, request) for request in scheduler.start_transfers()]
        if turn in aborts and requests:
            victim = requests[turn % len(requests)]
            if not victim.status.is_finished:
                scheduler.abort(victim.request_id)
        turn += 1
        while len(running) < depth and (not running or scheduler.can_run_ahead):
            plan = scheduler.schedule()
            if plan is None:
                break
            if running and ahead is not None:
                ahead.append(sum(not is_plain(r) and not r.status.is_finished for r in requests))
            written = [page for request in (*plan.prefills, *plan.decodes) for page in request.pages]
            assert len(written) == len(set(written))
            running.append((plan, device.launch(plan), written))
        if not running:
            continue
        free = {page for start, end in scheduler.pool._runs for page in range(start, end)}
        assert not any(free.intersection(written) for _, _, written in running), "a running step writes a free page"
        plan, result, _ = running.popleft()
        for request in scheduler.update(plan, result):
            if request.status.is_finished:
                told = (request.answer(), request.status, device.num_steps[request.request_id])
                ended[request.request_id] = told if request.error is None else request.error
            else:
                request.next_block()
                scheduler.add(request)
        waiting = [r for r in requests if r.status is RequestStatus.WAITING and is_steady(r)]
        assert not any(r.block.step for r in waiting), "a step of an old block"
        scheduler.pool.check()
        assert turn < 2000, "nobody moves"
    assert scheduler.pool.num_free == pages
    return ended


KINDS: list[dict[str, Any]] = [
    {},
    {"cache_policy": "prefix"},
    {"cache_policy": "none"},
    {"cache_policy": "dkv-decode"},
    {"cache_refresh_interval": 2},
    {"remask_below": 0.5},
]
PLAIN = st.tuples(st.integers(0, 15), st.sampled_from(KINDS[:2]), st.just(False))
ANY = st.tuples(st.integers(0, 15), st.sampled_from(KINDS), st.booleans())


@given(
    tau=st.integers(8, 80),
    pages=st.integers(7, 40),
    seqs=st.integers(1, 6),
    arrivals=st.one_of(st.lists(PLAIN, min_size=1, max_size=12), st.lists(ANY, min_size=1, max_size=12)),
)
def test_every_request_ends_as_it_does_when_nothing_runs_ahead(
    tau: int, pages: int, seqs: int, arrivals: list[Arrival]
) -> None:
    expected = run(1, tau, pages, seqs, arrivals, set())
    assert len(expected) == len(arrivals)
    assert run(2, tau, pages, seqs, arrivals, set()) == expected


@given(st.lists(ANY, min_size=1, max_size=12), st.sets(st.integers(1, 40), max_size=6))
def test_aborts_while_steps_run_leak_nothing_and_touch_nobody_else(arrivals: list[Arrival], aborts: set[int]) -> None:
    expected = run(1, 30, 20, 4, arrivals, set())
    for name, end in run(2, 30, 20, 4, arrivals, aborts).items():
        assert end == expected[name]


def ahead(*requests: Request, tau: int = 1000) -> tuple[Scheduler, StepPlan]:
    scheduler = Scheduler(SchedulerConfig(tau, 8), PagePool(64, 4))
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    return scheduler, plan


def test_a_prefill_that_runs_is_denoised_in_the_next_step() -> None:
    scheduler, first = ahead(make("a"))
    second = scheduler.schedule()
    assert second is not None and names(second.decodes) == ["a"] and second.decode_tokens == 4
    assert not scheduler.can_run_ahead, "two steps at most"
    assert scheduler.update(first, one_each(first)) == []
    third = scheduler.schedule()
    assert third is not None and names(third.decodes) == ["a"]


def test_what_surely_ends_with_the_running_step_is_not_in_the_next() -> None:
    scheduler, first = ahead(make("a", unmasking="quota"), make("b"))  # a commits its whole block in one step
    second = scheduler.schedule()
    assert second is not None and names(second.decodes) == ["b"]


def test_pages_of_a_block_that_ended_are_free_after_the_step_that_runs_it_once_more() -> None:
    scheduler, first = ahead(make("a"))
    second = scheduler.schedule()
    assert second is not None
    assert names(scheduler.update(first, StepResult([[(i, 1) for i in range(4)]]))) == ["a"]
    assert scheduler.pool.num_free == 60
    assert scheduler.update(second, StepResult([[]])) == [] and scheduler.pool.num_free == 64


@pytest.mark.parametrize("options", KINDS[2:])
def test_one_that_needs_the_result_keeps_everybody_waiting_for_it(options: dict[str, Any]) -> None:
    scheduler, first = ahead(make("a"), make("odd", **options))
    assert names(first.prefills) == ["a", "odd"] and not scheduler.can_run_ahead
    scheduler.abort("odd")
    assert scheduler.can_run_ahead


@pytest.mark.parametrize("options", KINDS[2:])
def test_one_that_waits_for_the_budget_keeps_nobody_waiting(options: dict[str, Any]) -> None:
    scheduler, first = ahead(make("a"), make("odd", arrival=1.0, **options), tau=16)
    assert names(first.prefills) == ["a"] and scheduler.can_run_ahead
    second = scheduler.schedule()
    assert second is not None and names(second.decodes) == ["a"]
    scheduler.update(first, one_each(first))
    while not second.prefills:
        assert scheduler.can_run_ahead
        third = scheduler.schedule()
        assert third is not None
        scheduler.update(second, one_each(second))
        second = third
    assert names(second.prefills) == ["odd"] and not scheduler.can_run_ahead


def test_one_whose_kv_came_while_a_step_ran_is_in_the_next() -> None:
    scheduler, _ = ahead(make("a"))
    scheduler.add(make("odd", prefilled=[(0, 1)], cache_policy="dkv-prefill"))
    assert names(scheduler.start_transfers()) == ["odd"]
    scheduler.transfer_ended("odd", arrived=True)
    assert scheduler.can_run_ahead
    second = scheduler.schedule()
    assert second is not None and names(second.decodes) == ["odd", "a"] and second.decode_tokens == 4 + 4
    assert not scheduler.can_run_ahead


def test_steps_are_scheduled_ahead_between_those_of_one_that_recomputes_everything() -> None:
    counts: list[int] = []
    arrivals: list[Arrival] = [(0, {}, False), (0, {}, False), (0, {"cache_policy": "none"}, False)]
    run(2, 10, 40, 8, arrivals, set(), counts)
    assert sum(map(bool, counts)) > 5


def test_steps_end_in_their_order() -> None:
    scheduler, first = ahead(make("a"))
    second = scheduler.schedule()
    assert second is not None
    with pytest.raises(ValueError, match="order"):
        scheduler.update(second, one_each(second))
    assert first.prefills[0].status is RequestStatus.DENOISING
