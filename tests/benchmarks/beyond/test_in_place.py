from __future__ import annotations

import pytest

from backend.core.routing import Route, RouteKind
from backend.core.worker_pool import WorkerLoad, WorkerPool
from benchmarks.beyond.in_place import HeldPrefill, InPlace, InPlacePolicy
from benchmarks.simulator.config import calibrated
from benchmarks.simulator.simulate import simulate
from benchmarks.simulator.workload import draw


class Pools:
    """One prefill worker (0) and two colocated ones (1, 2)."""

    def __init__(self) -> None:
        self.prefill, self.colocated = WorkerPool(), WorkerPool()
        self.loads = [WorkerLoad(number, 100, 16) for number in range(3)]
        for load, pool in zip(self.loads, (self.prefill, self.colocated, self.colocated), strict=True):
            pool.add(load)

    def route(self, margin: int, num_tokens: int = 100) -> tuple[int, RouteKind] | None:
        prefill = HeldPrefill(num_tokens, holder=self.loads[2])
        found: Route | None = InPlacePolicy(1000, margin).route(prefill, self.prefill, self.colocated)
        return (found.load.worker_id, found.kind) if found else None


def test_ties_are_the_holders_only_without_a_margin() -> None:
    assert Pools().route(0) == (2, RouteKind.COLOCATED)
    assert Pools().route(1) == (0, RouteKind.PREFILL)


@pytest.mark.parametrize("more, expected", [(399, 0), (400, 2)])
def test_prefill_workers_have_to_hold_the_margin_more(more: int, expected: int) -> None:
    pools = Pools()
    pools.loads[0].change(tokens=more)
    found = pools.route(400)
    assert found is not None and found[0] == expected


def test_another_colocated_worker_with_less_keeps_it_from_the_holder() -> None:
    pools = Pools()
    pools.loads[0].change(tokens=900)
    pools.loads[2].change(tokens=10)
    assert pools.route(1) == (0, RouteKind.PREFILL)


def test_no_holder_without_memory_or_over_the_threshold() -> None:
    full, busy = Pools(), Pools()
    full.loads[2].change(used=99)
    assert full.route(0) == (0, RouteKind.PREFILL)
    for load in busy.loads:
        load.change(tokens=1000)
    assert busy.route(0) is None


def test_refreshes_stay_where_their_block_was_denoised() -> None:
    config = calibrated("llada-8b", "sharegpt", num_prefill=2, num_colocated=2)
    workload = draw("sharegpt", 20, 1, qps=1.0)
    paper = simulate(config, workload)
    ours = simulate(config, workload, make_graph=InPlace(0))
    num_blocks = int(ours.requests["num_blocks"].sum())
    assert ours.pools["prefill"].num_prefills < num_blocks / 2 < paper.pools["prefill"].num_prefills
    assert ours.pools["prefill"].num_prefills + ours.pools["colocated"].num_prefills == num_blocks
