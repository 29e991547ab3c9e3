from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.routing import ColocatedPolicy, ConditionalPolicy, HybridPolicy, Policy, Prefill, RouteKind
from backend.core.worker_pool import WorkerLoad, WorkerPool
from tests.backend.core.naive import NaiveWorker, algorithm_2, colocated_serving

PAGE = 16


def pool(*loads: WorkerLoad) -> WorkerPool:
    made = WorkerPool()
    for load in loads:
        made.add(load)
    return made


def worker(
    worker_id: int, outstanding: int = 0, requests: int = 0, used: int = 0, promised: int = 0, pages: int = 100
) -> WorkerLoad:
    load = WorkerLoad(worker_id, pages, PAGE)
    load.change(tokens=outstanding, prefills=bool(outstanding), requests=requests, used=used, promised=promised)
    return load


def choice(policy: Policy, tokens: int, prefill: WorkerPool, colocated: WorkerPool) -> tuple[str, int] | None:
    route = policy.route(Prefill(tokens), prefill, colocated)
    return (route.kind.name.lower(), route.load.worker_id) if route else None


def test_colocated_the_least_outstanding_prefill_tokens_win_then_the_fewest_requests() -> None:
    policy = ColocatedPolicy()
    assert choice(policy, 100, pool(), pool()) is None
    assert choice(policy, 100, pool(), pool(worker(1, 500), worker(2, 100, 9))) == ("colocated", 2)
    assert choice(policy, 100, pool(), pool(worker(1, 0, 2), worker(2, 0, 1))) == ("colocated", 2)
    assert choice(policy, 100, pool(), pool(worker(2), worker(1))) == ("colocated", 1)


def test_colocated_queues_at_a_full_worker_but_not_at_one_that_is_too_small() -> None:
    policy = ColocatedPolicy()
    assert choice(policy, 100, pool(), pool(worker(1, used=100))) == ("colocated", 1)
    assert choice(policy, 100, pool(), pool(worker(1, pages=6), worker(2, 9000, pages=7))) == ("colocated", 2)
    assert choice(policy, 100, pool(), pool(worker(1, pages=6))) is None


def test_hybrid_prefers_the_prefill_pool_up_to_its_threshold() -> None:
    policy = HybridPolicy(1000)
    idle = pool(worker(9))
    assert choice(policy, 100, pool(worker(1, 999), worker(2, 1000)), idle) == ("prefill", 1)
    assert choice(policy, 100, pool(worker(1, 1000), worker(2, 1000)), idle) == ("colocated", 9)
    assert choice(policy, 10**4, pool(worker(1, pages=10**4)), pool(worker(9, pages=10**4))) == ("prefill", 1)


def test_hybrid_overflows_when_the_prefill_pool_has_no_memory() -> None:
    policy = HybridPolicy(1000)
    assert choice(policy, 100, pool(worker(1, used=94)), pool(worker(9))) == ("colocated", 9)
    assert choice(policy, 96, pool(worker(1, used=94)), pool(worker(9))) == ("prefill", 1)
    assert choice(policy, 100, pool(worker(1, used=94), worker(2, 900)), pool(worker(9))) == ("prefill", 2)


def test_hybrid_leaves_pages_promised_to_pending_decodes_alone() -> None:
    policy, full = HybridPolicy(1000), pool(worker(1, 1000))
    assert choice(policy, 100, full, pool(worker(8, used=50, promised=44), worker(9, 900))) == ("colocated", 9)
    assert choice(policy, 96, full, pool(worker(8, used=50, promised=44), worker(9, 900))) == ("colocated", 8)
    assert choice(policy, 100, full, pool(worker(8, used=50, promised=44), worker(9, 1000))) is None


def test_an_infinite_threshold_never_overflows() -> None:
    policy = HybridPolicy(inf)
    assert choice(policy, 100, pool(worker(1, 10**9)), pool(worker(9))) == ("prefill", 1)
    assert choice(policy, 100, pool(worker(1, used=100)), pool(worker(9))) is None


@pytest.mark.parametrize("threshold", [1000, inf])
def test_without_a_prefill_worker_that_can_hold_it_it_is_colocated_serving(threshold: float) -> None:
    policy = HybridPolicy(threshold)
    busy = pool(worker(8, 5000, used=100), worker(9, 5001))
    assert choice(policy, 100, pool(), busy) == ("colocated", 8)
    assert choice(policy, 100, pool(worker(1, pages=6)), busy) == ("colocated", 8)


@pytest.mark.parametrize("threshold", [0, -1, nan])
def test_a_threshold_that_nothing_is_under_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        HybridPolicy(threshold)


WORKERS = st.lists(
    st.tuples(
        st.integers(1, 12),  # pages
        st.sampled_from((0, 0, 50, 60, 100)),  # o_w
        st.integers(0, 2),  # requests
        st.integers(0, 12),  # used
        st.integers(0, 4),  # promised
        st.booleans(),  # draining
    ),
    max_size=7,
)


def built(drawn: list[tuple[int, int, int, int, int, bool]], first_id: int, with_promises: bool) -> list[WorkerLoad]:
    return [
        worker(first_id + i, outstanding, requests, min(used, pages), promised * with_promises, pages)
        for i, (pages, outstanding, requests, used, promised, _) in enumerate(drawn)
    ]


@given(
    WORKERS, WORKERS, st.sampled_from((1, 50, 51, 60, 100, 101, 500, inf)), st.lists(st.integers(1, 200), min_size=1)
)
def test_hybrid_decides_as_algorithm_2_whatever_the_state(
    drawn_prefill: list[tuple[int, int, int, int, int, bool]],
    drawn_colocated: list[tuple[int, int, int, int, int, bool]],
    theta: float,
    sizes: list[int],
) -> None:
    """Decisions in a row, each charged before the next, against a model over plain lists."""
    policy = HybridPolicy(theta)
    prefill, colocated = built(drawn_prefill, 0, False), built(drawn_colocated, 100, True)
    pools = []
    for loads, drawn in ((prefill, drawn_prefill), (colocated, drawn_colocated)):
        pools.append(pool(*(load for load, facts in zip(loads, drawn, strict=True) if not facts[-1])))
    for tokens in sizes:
        naive_prefill, naive_colocated = ([NaiveWorker.of(load) for load in loads] for loads in (prefill, colocated))
        expected = algorithm_2(tokens, naive_prefill, naive_colocated, theta)
        assert choice(policy, tokens, *pools) == expected
        by_colocated = choice(ColocatedPolicy(), tokens, *pools)
        alone = colocated_serving(tokens, naive_colocated)
        assert by_colocated == (("colocated", alone.name) if alone else None)
        if expected is not None:
            load = next(load for load in prefill + colocated if load.worker_id == expected[1])
            load.change(tokens=tokens, prefills=1, requests=1, used=load.pages_for(tokens))


@pytest.mark.parametrize("policy", [HybridPolicy(1000), HybridPolicy(inf), ConditionalPolicy(0, 10)])
def test_what_must_stay_local_is_served_as_if_there_were_no_prefill_pool(policy: Policy) -> None:
    prefill = Prefill(100, 50, previous=RouteKind.PREFILL, is_local_only=True)
    route = policy.route(prefill, pool(worker(1)), pool(worker(8, 5000, used=100), worker(9, 5001)))
    assert route is not None and (route.kind, route.load.worker_id) == (RouteKind.COLOCATED, 8)


def conditional(prefill: Prefill, prefill_pool: WorkerPool, colocated: WorkerPool) -> RouteKind | None:
    route = ConditionalPolicy(1000, 2).route(prefill, prefill_pool, colocated)
    return route.kind if route else None


def test_conditional_decides_by_prompt_length_and_queue_once_per_request() -> None:
    short, long = Prefill(1100, 1000), Prefill(1200, 1001)
    idle, queued = pool(worker(1)), pool(worker(1, 500), worker(2, 500))
    colocated = pool(worker(9))
    assert conditional(short, idle, colocated) is RouteKind.COLOCATED
    assert conditional(long, idle, colocated) is RouteKind.PREFILL
    assert conditional(long, queued, colocated) is RouteKind.COLOCATED
    refresh = Prefill(1200, 1001, previous=RouteKind.PREFILL)
    assert conditional(refresh, queued, colocated) is RouteKind.PREFILL
    assert conditional(Prefill(1200, 1001, previous=RouteKind.COLOCATED), idle, colocated) is RouteKind.COLOCATED


def test_conditional_waits_for_memory_of_the_prefill_pool_and_knows_no_threshold() -> None:
    long, colocated = Prefill(1200, 1001), pool(worker(9, 10**6, used=100))
    assert conditional(long, pool(worker(1, 10**6)), colocated) is RouteKind.PREFILL
    assert conditional(long, pool(worker(1, used=90)), colocated) is None
    assert conditional(long, pool(), colocated) is RouteKind.COLOCATED
    assert conditional(long, pool(worker(1, pages=10)), colocated) is RouteKind.COLOCATED
