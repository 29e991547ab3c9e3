from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.ledger import Ledger
from backend.core.routing import ColocatedPolicy, Route, WorkerLoad


def test_the_least_outstanding_prefill_tokens_win_then_the_fewest_requests() -> None:
    policy = ColocatedPolicy()
    assert policy.route([]) is None
    assert policy.route([WorkerLoad(1, 500, 0), WorkerLoad(2, 100, 9)]) == Route(2)
    assert policy.route([WorkerLoad(1, 0, 2), WorkerLoad(2, 0, 1)]) == Route(2)
    assert policy.route([WorkerLoad(2, 0, 0), WorkerLoad(1, 0, 0)]) == Route(1)


def test_a_charge_is_released_once_whatever_is_said_twice() -> None:
    ledger = Ledger()
    first, second = ("a", 0, 1), ("a", 0, 2)
    ledger.charge(first, 7, 100)
    with pytest.raises(ValueError, match="charged already"):
        ledger.charge(first, 8, 100)
    ledger.charge(second, 7, 50)
    assert ledger.loads([7, 8]) == [WorkerLoad(7, 150, 2), WorkerLoad(8, 0, 0)]
    for _ in range(3):
        ledger.prefilled(first)
    assert ledger.loads([7]) == [WorkerLoad(7, 50, 2)]
    for _ in range(3):
        ledger.done(first)
        ledger.prefilled(first)
    assert ledger.loads([7]) == [WorkerLoad(7, 50, 1)]
    ledger.done(second)
    assert ledger.loads([7]) == [WorkerLoad(7, 0, 0)]
    assert ledger.outstanding_prefill_tokens == {}


@given(st.integers(0, 10**6))
def test_balances_after_any_order_of_news(seed: int) -> None:
    rng = random.Random(seed)
    ledger = Ledger()
    open_charges: dict[tuple[str, int, int], list[int]] = {}
    for i in range(100):
        action = rng.random()
        if action < 0.4 or not open_charges:
            dispatch = (str(i), 0, 1)
            worker, tokens = rng.randint(0, 3), rng.randint(1, 50)
            ledger.charge(dispatch, worker, tokens)
            open_charges[dispatch] = [worker, tokens]
        else:
            dispatch = rng.choice(list(open_charges))
            ledger.prefilled(dispatch)
            open_charges[dispatch][1] = 0
            if action > 0.7:
                ledger.done(dispatch)
                del open_charges[dispatch]
        for load in ledger.loads(range(4)):
            mine = [tokens for worker, tokens in open_charges.values() if worker == load.worker_id]
            assert (load.outstanding_prefill_tokens, load.num_requests) == (sum(mine), len(mine))
