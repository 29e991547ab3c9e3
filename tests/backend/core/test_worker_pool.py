from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.worker_pool import WorkerLoad, WorkerPool
from tests.backend.core.naive import NaiveWorker, least_loaded

PAGE = 16
CHANGES = st.lists(
    st.tuples(st.integers(0, 59), st.integers(0, 3), st.integers(0, 2), st.integers(0, 12), st.integers(0, 3)),
    max_size=80,
)


def worker_ids(loads: object) -> list[int]:
    return [load.worker_id for load in loads]  # type: ignore[attr-defined]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=60), CHANGES, st.lists(st.integers(0, 59), max_size=30))
def test_choices_are_those_of_a_look_at_all_workers(
    sizes: list[int], changes: list[tuple[int, int, int, int, int]], toggles: list[int]
) -> None:
    pool = WorkerPool()
    loads = [WorkerLoad(i, pages, PAGE) for i, pages in enumerate(sizes)]
    for load in loads:
        pool.add(load)
    for step, (at, prefills, requests, used, promised) in enumerate(changes):
        load = loads[at % len(loads)]
        load.change(
            tokens=100 * prefills - load.outstanding_prefill_tokens,
            prefills=prefills - load.num_prefills,
            requests=requests - load.num_requests,
            used=used - load.used_pages,
            promised=promised - load.promised_pages,
        )
        if step < len(toggles):
            toggled = loads[toggles[step] % len(loads)]
            if toggled.pool is None:
                pool.add(toggled)
            else:
                pool.remove(toggled)
        shown = [NaiveWorker.of(load) for load in loads if load.pool is pool]
        assert sorted(worker_ids(pool)) == [worker.name for worker in shown]
        assert pool.capacity_tokens == max((worker.capacity for worker in shown), default=0)
        assert pool.num_prefills == sum(load.num_prefills for load in loads if load.pool is pool)
        for tokens in (1, 3 * PAGE, 7 * PAGE + 1, 12 * PAGE):
            for below in (100, 250, inf):
                fitting = [w for w in shown if w.outstanding < below and w.holds_after_promises(tokens)]
                found, expected = pool.least_loaded(tokens, below), least_loaded(fitting)
                assert (found and found.worker_id) == (expected and expected.name)
            able = [worker for worker in shown if worker.can_ever_hold(tokens)]
            found, expected = pool.least_loaded_ever(tokens), least_loaded(able)
            assert (found and found.worker_id) == (expected and expected.name)
            found = pool.roomiest(tokens)
            assert (found is None) == (not able)
            if found is not None:
                most = max(worker.capacity - worker.used - worker.promised for worker in able)
                assert found.capacity_tokens >= tokens and found.available_tokens == most


def test_what_is_promised_is_not_available() -> None:
    load = WorkerLoad(1, 10, PAGE)
    load.change(used=6, promised=3)
    assert (load.free_pages, load.available_tokens) == (4, PAGE)
    load.change(promised=3)
    assert load.available_tokens == -2 * PAGE


def test_a_worker_is_in_one_pool_at_a_time() -> None:
    first, second = WorkerPool(), WorkerPool()
    load = WorkerLoad(1, 10, PAGE)
    first.add(load)
    for pool, again in ((first, load), (second, load), (first, WorkerLoad(1, 5, PAGE))):
        with pytest.raises(ValueError, match="worker 1 is in a pool already"):
            pool.add(again)
    first.remove(load)
    second.add(load)
    assert (len(first), len(second), load.pool) == (0, 1, second)


def test_a_worker_that_is_hidden_comes_back_with_its_account() -> None:
    pool = WorkerPool()
    busy, idle = WorkerLoad(1, 10, PAGE), WorkerLoad(2, 10, PAGE)
    for load in (busy, idle):
        pool.add(load)
    pool.remove(busy)
    busy.change(tokens=50, prefills=1, requests=1, used=4)
    assert pool.num_prefills == 0
    pool.add(busy)
    assert pool.num_prefills == 1
    assert pool.least_loaded(PAGE, inf) is idle
    idle.change(tokens=60, prefills=1)
    assert pool.least_loaded(PAGE, inf) is busy
    assert pool.least_loaded(7 * PAGE, inf) is idle
