from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backend.core.placer import Placer
from backend.core.step import PHASES
from benchmarks.lengths import Length
from benchmarks.metrics import Objective
from benchmarks.simulator.config import SimulatorConfig, calibrated
from benchmarks.simulator.denoising import Lognormal
from benchmarks.simulator.result import Result
from benchmarks.simulator.simulate import simulate
from benchmarks.simulator.workload import Workload, draw

GRAPHS: dict[str, dict[str, Any]] = {
    "colocated": {"num_colocated": 3},
    "hybrid": {"num_prefill": 2, "num_colocated": 1},
    "disaggregated": {"num_prefill": 2, "num_colocated": 1, "overflow_threshold": math.inf},
    "conditional": {"num_prefill": 2, "num_colocated": 1, "routing": "conditional"},
}
SIXTEEN = Lognormal(16.0, 0.0, 0.0)


def of(graph: str, **changes: Any) -> SimulatorConfig:
    return replace(calibrated("llada-8b", "sharegpt"), **GRAPHS[graph], **changes)


def one(num_tokens: int, **changes: Any) -> Workload:
    return Workload("one", (Length(1000, num_tokens),), (0.5,), canvas_length=1024, **changes)


def phases(result: Result) -> list[float]:
    return [float(result.requests[f"{phase}_s"][0]) for phase in PHASES]


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_same_arguments_give_the_same_bytes(graph: str) -> None:
    workload = draw("sharegpt", 80, 3, qps=3.0)
    first, again = simulate(of(graph), workload), simulate(of(graph), workload)
    assert all(np.array_equal(first.requests[name], again.requests[name]) for name in first.requests)
    assert replace(first, requests={}) == replace(again, requests={})
    other = simulate(of(graph), draw("sharegpt", 80, 4, qps=3.0))
    assert other.latency != first.latency


@pytest.mark.parametrize("graph", GRAPHS)
def test_every_request_gets_its_answer(graph: str) -> None:
    workload = draw("sharegpt", 80, 3, qps=3.0)
    result = simulate(of(graph), workload)
    expected = [-(-length.num_output_tokens // 32) * 32 for length in workload.lengths]
    assert result.requests["num_tokens"].tolist() == expected
    assert (result.requests["num_blocks"] * 32).tolist() == expected
    prefills = sum(use.num_prefills for use in result.pools.values())
    assert prefills == sum(expected) // 32
    summary = result.summary(Objective(20.0))
    assert summary.num_completed == 80 and summary.latency.p99 == pytest.approx(result.latency.p99)
    # What is in no phase are messages: two per block, and three and the KV's way where it is handed over.
    rest = result.requests["latency_s"] - sum(result.requests[f"{phase}_s"] for phase in PHASES)
    hops = rest / 1e-3 / result.requests["num_blocks"]
    assert 2 - 1e-6 < hops.min() and hops.max() < 4 + 1e-6


def test_a_request_alone_takes_what_its_steps_take() -> None:
    config = of("colocated", steps=SIXTEEN)
    latency = config.step_latency(32)
    result = simulate(config, one(64))
    prefill, decode = latency.step_s((2024,), 0, 0), latency.step_s((), 1, 2024)
    assert phases(result) == pytest.approx([0, 2 * prefill, 0, 0, 2 * 15 * decode])
    assert result.latency.mean == pytest.approx(2 * prefill + 30 * decode + 4 * config.hop_s)
    assert result.requests["first_token_latency_s"][0] == pytest.approx(prefill + 2 * config.hop_s)


def test_a_block_handed_over_takes_its_transfer_and_one_more_message_each_way() -> None:
    config = of("hybrid", steps=SIXTEEN)
    latency = config.step_latency(32)
    result = simulate(config, one(32))
    prefill, decode = latency.step_s((2024,), 0, 0) + config.hand_over_s, latency.step_s((), 1, 2024)
    kv_s = config.transfer_s + 127 * 16 * 524288 / 200e9
    assert phases(result) == pytest.approx([0, prefill, 0, kv_s, 15 * decode])
    assert result.latency.mean == pytest.approx(prefill + kv_s + 15 * decode + 4 * config.hop_s)


@pytest.mark.parametrize(
    ("policy", "interval", "num_refreshes", "tokens"),
    [("none", None, 15, 0), ("prefix", None, 0, 1024), ("dual", 5, 3, 32), ("prefix", 8, 1, 1024), ("dual", 0, 0, 32)],
)
def test_a_block_takes_what_its_cache_policy_computes(
    policy: str, interval: int | None, num_refreshes: int, tokens: int
) -> None:
    config = of("colocated", steps=SIXTEEN, cache_policy=policy, cache_refresh_interval=interval)
    latency = config.step_latency(32)
    result = simulate(config, one(32))
    prefill, decode = latency.step_s((2024,), 0, 0), latency.step_s((), 1, 2024, tokens)
    rest = num_refreshes * prefill + (15 - num_refreshes) * decode
    assert phases(result) == pytest.approx([0, prefill, 0, 0, rest])
    use = result.pools["colocated"]
    assert (use.num_prefills, use.num_refreshes) == (1, num_refreshes)


def test_kv_that_the_next_step_computes_anew_is_not_read() -> None:
    config = of("hybrid", steps=SIXTEEN, cache_policy="none")
    result = simulate(config, one(32))
    assert phases(result)[3] == pytest.approx(config.transfer_s + 16 * 524288 / 200e9)
    prefill, decode = result.pools["prefill"], result.pools["colocated"]
    assert (prefill.num_prefills, prefill.num_refreshes, decode.num_prefills, decode.num_refreshes) == (1, 0, 0, 15)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("policy", ["none", "prefix", "dkv-decode", "dkv-prefill"])
def test_every_cache_policy_gives_every_answer(graph: str, policy: str) -> None:
    workload = draw("sharegpt", 30, 3, qps=1.0)
    result = simulate(of(graph, cache_policy=policy), workload)
    assert result.requests["num_steps"].tolist() == simulate(of(graph), workload).requests["num_steps"].tolist()
    assert result.latency.mean > simulate(of(graph), workload).latency.mean


def test_a_policy_that_has_to_know_what_is_committed_is_refused() -> None:
    with pytest.raises(ValueError, match="dkv-greedy"):
        simulate(of("colocated", cache_policy="dkv-greedy"), one(32))


def test_a_block_that_its_prefill_finishes_is_not_handed_over() -> None:
    result = simulate(of("hybrid", steps=Lognormal(1.0001, 0.0, 0.0)), one(64))
    _, prefill, *rest = phases(result)
    assert prefill > 0 and not any(rest)


@pytest.mark.parametrize(
    ("mode", "num_tokens", "num_steps"),
    [("whole blocks", 64, 32), ("fixed length", 40, 16 + 4), ("end of text", 40, 16 + 5)],
)
def test_where_answers_end(mode: Any, num_tokens: int, num_steps: int) -> None:
    """Two positions a step: eight are there after the 4th of the second block, a token behind them after the 5th."""
    result = simulate(of("colocated", steps=SIXTEEN), one(40, mode=mode))
    assert (result.requests["num_tokens"][0], result.requests["num_steps"][0]) == (num_tokens, num_steps)
    assert result.mode == mode


def test_in_a_closed_loop_each_client_asks_when_it_has_its_answer() -> None:
    workload = draw("sharegpt", 40, 1, process="closed", num_clients=4)
    result = simulate(of("colocated"), workload)
    due, finished = (result.requests["due_s"], result.requests["due_s"] + result.requests["latency_s"])
    assert (due[:4] == 0).all()
    assert sorted(due[4:]) == pytest.approx(sorted(finished)[:36])


def test_past_the_prefill_pools_capacity_overflow_shortens_the_queue() -> None:
    workload = draw("sharegpt", 200, 1, qps=3.0)
    never, hybrid = simulate(of("disaggregated"), workload), simulate(of("hybrid"), workload)
    assert never.num_overflows == 0 < hybrid.num_overflows
    assert hybrid.phase("prefill_queue").p90 < never.phase("prefill_queue").p90
    assert never.pools["colocated"].num_prefills == 0 < never.pools["prefill"].utilization <= 1


def test_a_faster_gpu_is_faster_and_more_load_slower() -> None:
    slow, fast = (simulate(of("colocated", gpu=gpu), draw("sharegpt", 100, 1, qps=2.0)) for gpu in ("h100", "b200"))
    assert fast.latency.mean < slow.latency.mean
    assert simulate(of("colocated"), draw("sharegpt", 100, 1, qps=3.5)).latency.mean > slow.latency.mean


def test_nothing_may_be_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placer, "hand_over", lambda placer, dispatch: None)
    with pytest.raises(RuntimeError, match=r"1 blocks never ended, 127 pages"):
        simulate(of("hybrid"), one(64))


def test_a_request_that_fits_no_worker_is_refused() -> None:
    with pytest.raises(ValueError, match="2024 tokens do not fit"):
        simulate(of("colocated", kv_cache_tokens=2000), one(64))


def test_on_another_gpu_the_kv_pool_is_what_its_memory_holds() -> None:
    assert calibrated("llada-8b", "arxiv").num_pages * 16 == 90112
    assert calibrated("llada-8b", "arxiv", gpu="h200").num_pages == 203837 // 16
    assert calibrated("llada-8b", "arxiv", gpu="h200", kv_cache_tokens=1600).num_pages == 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": "abacus"}, "h100"),
        ({"model": "bert"}, "llada-8b"),
        ({"routing": "x"}, "hybrid"),
        ({"num_colocated": 0}, "1"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SimulatorConfig(), **changes)
    with pytest.raises(ValueError, match="no calibration"):
        calibrated("llada-8b", "poems")
