from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.ledger import Dispatch, Ledger
from backend.core.worker_pool import WorkerLoad

PAGE = 16
A, B = ("a", 0, 1), ("a", 0, 2)


def worker(worker_id: int = 1, pages: int = 100) -> WorkerLoad:
    return WorkerLoad(worker_id, pages, PAGE)


def account(load: WorkerLoad) -> tuple[int, int, int, int, int]:
    """o_w, its prefills, requests, used and promised pages."""
    return (
        load.outstanding_prefill_tokens, load.num_prefills, load.num_requests, load.used_pages, load.promised_pages
    )  # fmt: skip


def test_a_block_that_stays_where_it_is_prefilled() -> None:
    ledger, load = Ledger(), worker()
    ledger.place(A, load, 100)
    assert account(load) == (100, 1, 1, 7, 0)
    assert ledger.prefilled(A) is load
    assert account(load) == (0, 0, 1, 7, 0)
    assert ledger.done(A) == [load]
    assert account(load) == (0, 0, 0, 0, 0)


def test_a_block_that_moves_holds_both_ends_until_its_source_is_free() -> None:
    ledger, source, promising, target = Ledger(), worker(1), worker(2), worker(3)
    ledger.place(A, source, 100)
    ledger.prefilled(A)
    ledger.promise(A, promising, 100)
    assert account(promising) == (0, 0, 0, 0, 7)
    ledger.reserve(A, target, 100)
    assert [account(load) for load in (source, promising, target)] == [
        (0, 0, 1, 7, 0), (0, 0, 0, 0, 0), (0, 0, 1, 7, 0)
    ]  # fmt: skip
    assert ledger.source_freed(A) is source
    assert account(source) == (0, 0, 0, 0, 0)
    assert ledger.done(A) == [target]
    assert account(target) == (0, 0, 0, 0, 0)


def test_a_promise_is_kept_where_it_was_given() -> None:
    ledger, source, target = Ledger(), worker(1), worker(2)
    ledger.place(A, source, 100)
    ledger.promise(A, target, 100)
    ledger.reserve(A, target, 100)
    assert account(target) == (0, 0, 1, 7, 0)


def test_a_promise_can_be_moved_and_taken_back() -> None:
    ledger, source, first, second = Ledger(), worker(1), worker(2), worker(3)
    ledger.place(A, source, 100)
    ledger.promise(A, first, 100)
    ledger.promise(A, second, 100)
    assert (account(first), account(second)) == ((0,) * 5, (0, 0, 0, 0, 7))
    ledger.unpromise(A)
    ledger.unpromise(A)
    assert account(second) == (0,) * 5
    ledger.promise(A, first, 100)
    assert ledger.done(A) == [source, first]
    assert account(source) == account(first) == (0,) * 5


def test_pages_are_counted_in_those_of_each_worker() -> None:
    ledger, source, target = Ledger(), WorkerLoad(1, 100, 16), WorkerLoad(2, 100, 32)
    ledger.place(A, source, 100)
    ledger.reserve(A, target, 100)
    assert (source.used_pages, target.used_pages) == (7, 4)


def test_a_source_freed_before_its_forward_was_told_of_releases_both() -> None:
    ledger, load = Ledger(), worker()
    ledger.place(A, load, 100)
    assert ledger.source_freed(A) is load
    assert account(load) == (0,) * 5
    assert ledger.prefilled(A) is None and ledger.done(A) == []


def test_each_attempt_has_its_own_charge() -> None:
    ledger, load = Ledger(), worker()
    ledger.place(A, load, 100)
    ledger.place(B, load, 50)
    with pytest.raises(ValueError, match="charged already"):
        ledger.place(A, load, 100)
    ledger.done(A)
    assert account(load) == (50, 1, 1, 4, 0)


def test_a_block_has_one_place_to_be_denoised() -> None:
    ledger, load = Ledger(), worker()
    ledger.place(A, worker(), 100)
    ledger.reserve(A, load, 100)
    with pytest.raises(ValueError, match="has its place already"):
        ledger.reserve(A, load, 100)


def test_what_is_said_twice_or_of_strangers_changes_nothing() -> None:
    ledger, load, other = Ledger(), worker(), worker(2)
    ledger.place(B, other, 30)
    before = account(other)
    for _ in range(3):
        assert ledger.prefilled(A) is None and ledger.source_freed(A) is None and ledger.done(A) == []
    ledger.place(A, load, 100)
    ledger.prefilled(A)
    for _ in range(3):
        assert ledger.prefilled(A) is None
    ledger.source_freed(A)
    for _ in range(3):
        assert ledger.source_freed(A) is None
    for _ in range(3):
        ledger.done(A)
    assert (account(load), account(other)) == ((0,) * 5, before)
    assert A not in ledger and B in ledger and len(ledger) == 1


def test_a_worker_that_is_lost_and_comes_back_starts_a_new_account() -> None:
    ledger, lost = Ledger(), worker(1)
    ledger.place(A, lost, 100)
    back = worker(1)
    ledger.place(B, back, 50)
    ledger.done(A)
    assert account(back) == (50, 1, 1, 4, 0)


@dataclass
class Charge:
    tokens: int
    source: WorkerLoad | None
    has_run: bool = False
    promise: WorkerLoad | None = None
    target: WorkerLoad | None = None


@given(st.integers(0, 10**6))
def test_balances_after_any_order_of_news(seed: int) -> None:
    rng = random.Random(seed)
    ledger, loads = Ledger(), [worker(i) for i in range(4)]
    charges: dict[Dispatch, Charge] = {}
    for number in range(150):
        action = rng.choice(("place", "place", "prefilled", "promise", "unpromise", "reserve", "freed", "done"))
        if action == "place" or not charges:
            dispatch = (str(number), 0, 1)
            charges[dispatch] = charge = Charge(rng.randint(1, 90), rng.choice(loads))
            assert charge.source is not None
            ledger.place(dispatch, charge.source, charge.tokens)
            continue
        dispatch, charge = rng.choice(list(charges.items()))
        if action == "prefilled":
            ledger.prefilled(dispatch)
            charge.has_run = True
        elif action == "promise" and charge.target is None:
            charge.promise = rng.choice(loads)
            ledger.promise(dispatch, charge.promise, charge.tokens)
        elif action == "unpromise":
            charge.promise = None
            ledger.unpromise(dispatch)
        elif action == "reserve" and charge.target is None:
            charge.promise, charge.target = None, rng.choice(loads)
            ledger.reserve(dispatch, charge.target, charge.tokens)
        elif action == "freed":
            assert ledger.source_freed(dispatch) is charge.source
            charge.source, charge.has_run = None, True
        elif action == "done":
            held = [load for load in (charge.source, charge.promise, charge.target) if load is not None]
            assert ledger.done(dispatch) == held
            del charges[dispatch]
        for load in loads:
            waiting = [c.tokens for c in charges.values() if c.source is load and not c.has_run]
            here = [c.tokens for c in charges.values() for place in (c.source, c.target) if place is load]
            promised = [c.tokens for c in charges.values() if c.promise is load]
            assert account(load) == (
                sum(waiting), len(waiting), len(here),
                sum(map(load.pages_for, here)), sum(map(load.pages_for, promised)),
            )  # fmt: skip
        assert len(ledger) == len(charges)
