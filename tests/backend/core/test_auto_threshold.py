from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from backend.core.auto_threshold import DECODE_SHARE, AutoHybridPolicy
from backend.core.routing import HybridPolicy, Prefill, RouteKind
from backend.core.worker_pool import WorkerLoad, WorkerPool

PAGE = 16


def worker(worker_id: int, outstanding: int = 0, decodes: int = 0, pages: int = 1000, used: int = 0) -> WorkerLoad:
    load = WorkerLoad(worker_id, pages, PAGE)
    prefills = int(outstanding > 0)
    load.change(tokens=outstanding, prefills=prefills, requests=decodes + prefills, used=used)
    return load


def pool(*loads: WorkerLoad) -> WorkerPool:
    made = WorkerPool()
    for load in loads:
        made.add(load)
    return made


def choice(policy: HybridPolicy, prefill_pool: WorkerPool, colocated_pool: WorkerPool) -> tuple[str, int] | None:
    route = policy.route(Prefill(1000), prefill_pool, colocated_pool)
    return (route.kind.name.lower(), route.load.worker_id) if route else None


def test_idle_workers_of_the_prefill_pool_come_first() -> None:
    assert choice(AutoHybridPolicy(), pool(worker(1)), pool(worker(9))) == ("prefill", 1)


def test_the_more_decodes_an_overflow_holds_up_the_longer_the_queue_before_it() -> None:
    policy = AutoHybridPolicy()
    for decodes in (0, 4, 12):
        queue = round(DECODE_SHARE * 1000 * decodes)
        busy = pool(worker(9, decodes=decodes))
        assert choice(policy, pool(worker(1, queue), worker(2, queue + 9)), busy) == ("prefill", 1)
        assert choice(policy, pool(worker(1, queue + 1), worker(2, queue + 9)), busy) == ("colocated", 9)
        assert policy.overflow_threshold == queue + 1


def test_what_waits_at_the_colocated_worker_counts() -> None:
    policy = AutoHybridPolicy()
    assert choice(policy, pool(worker(1, 3000)), pool(worker(9, 3000))) == ("prefill", 1)
    assert choice(policy, pool(worker(1, 3000)), pool(worker(9, 2000))) == ("colocated", 9)


def test_without_memory_for_it_there_is_no_overflow_and_no_prefill_worker_to_wait_for() -> None:
    policy = AutoHybridPolicy()
    assert choice(policy, pool(worker(1, 10**6)), pool(worker(9, used=1000))) == ("prefill", 1)
    assert policy.overflow_threshold == inf
    assert choice(policy, pool(worker(1, used=1000)), pool(worker(9, used=1000))) is None
    assert choice(policy, pool(worker(1, used=1000)), pool(worker(9, decodes=9))) == ("colocated", 9)


def test_without_prefill_workers_it_is_colocated_serving() -> None:
    assert choice(AutoHybridPolicy(), pool(), pool(worker(1, 5), worker(2, 4, used=1000))) == ("colocated", 2)


LOADS = st.lists(
    st.tuples(st.integers(0, 9000), st.integers(0, 30), st.sampled_from([0, 900, 1000])), min_size=1, max_size=5
)


@given(LOADS, LOADS)
def test_it_is_algorithm_2_with_the_threshold_that_it_shows(
    prefill: list[tuple[int, int, int]], colocated: list[tuple[int, int, int]]
) -> None:
    def made(loads: list[tuple[int, int, int]], first: int) -> WorkerPool:
        return pool(*(worker(first + i, o_w, decodes, used=used) for i, (o_w, decodes, used) in enumerate(loads)))

    pools = made(prefill, 0), made(colocated, 100)
    policy = AutoHybridPolicy()
    found = policy.route(Prefill(1000), *pools)
    assert found == HybridPolicy(policy.overflow_threshold).route(Prefill(1000), *pools)
    has_room = any(load.available_tokens >= 1000 for members in pools for load in members)
    assert (found is not None) == has_room
    if found is not None and found.kind is RouteKind.COLOCATED:
        others = [load.outstanding_prefill_tokens for load in pools[0] if load.available_tokens >= 1000]
        assert all(o_w > found.load.outstanding_prefill_tokens for o_w in others)
