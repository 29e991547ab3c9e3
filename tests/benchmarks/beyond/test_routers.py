from __future__ import annotations

import pytest

from backend.core.routing import HybridPolicy, Prefill, Route
from backend.core.worker_pool import WorkerLoad
from benchmarks.beyond.routers import Informed, SeveralRouters
from benchmarks.simulator.config import calibrated
from benchmarks.simulator.simulate import simulate
from benchmarks.simulator.workload import draw

CONFIG = calibrated("llada-8b", "sharegpt", num_prefill=2, num_colocated=2)
BUSY = draw("sharegpt", 40, 1, qps=4.0)


@pytest.mark.parametrize("report_s", [None, 0.1])
def test_one_of_several_is_the_router(report_s: float | None) -> None:
    one, several = simulate(CONFIG, BUSY), simulate(CONFIG, BUSY, make_graph=SeveralRouters(1, report_s))
    assert several.latency == one.latency and several.num_overflows == one.num_overflows


@pytest.mark.parametrize("report_s, has_prefills", [(None, False), (0.05, True), (0.05, False), (1.0, True)])
def test_all_blocks_end_and_nothing_stays_charged(report_s: float | None, has_prefills: bool) -> None:
    tight = calibrated("llada-8b", "sharegpt", num_prefill=2, num_colocated=2, kv_cache_tokens=8192)
    result = simulate(tight, BUSY, make_graph=SeveralRouters(3, report_s, has_prefills))
    assert len(result.requests["latency_s"]) == 40 and result.latency.max > 0


def test_what_reports_tell_makes_a_difference() -> None:
    ways = [(0.1, True), (1.0, True), (0.1, False), (None, False)]
    means = {simulate(CONFIG, BUSY, make_graph=SeveralRouters(3, *way)).latency.mean for way in ways}
    assert len(means) == len(ways)


def test_who_is_told_of_others_goes_elsewhere_and_back() -> None:
    routes: list[int] = []

    def assign(dispatch: object, route: Route) -> None:
        routes.append(route.load.worker_id)

    placer = Informed(HybridPolicy(8192), assign)
    for number in range(2):
        placer.show(WorkerLoad(number, 1000, 16), placer.prefill_pool)
    placer.show(WorkerLoad(2, 1000, 16), placer.colocated_pool)
    placer.told(0, (5000, 2, 2, 100))
    placer.submit(("0", 0, 1), Prefill(1000))
    assert placer.own(0) == (0, 0, 0, 0) and placer.own(1)[0] == 1000
    placer.told(0, (0, 0, 0, 0))
    placer.submit(("1", 0, 1), Prefill(1000))
    assert routes == [1, 0]


def test_a_report_lets_what_waits_go() -> None:
    routes: list[int] = []
    placer = Informed(HybridPolicy(float("inf")), lambda dispatch, route: routes.append(route.load.worker_id))
    placer.show(WorkerLoad(0, 100, 16), placer.prefill_pool)
    placer.show(WorkerLoad(1, 100, 16), placer.colocated_pool)
    placer.told(0, (0, 0, 1, 90))
    placer.submit(("0", 0, 1), Prefill(1000))
    assert not routes
    placer.told(0, (0, 0, 0, 0))
    assert routes == [0]
