from __future__ import annotations

from benchmarks.beyond.keeping import Keeping
from benchmarks.simulator.config import calibrated
from benchmarks.simulator.simulate import simulate
from benchmarks.simulator.workload import draw

CONFIG = calibrated("llada-8b", "sharegpt", num_prefill=1, num_colocated=1)


def test_an_idle_prefill_worker_denoises_all_blocks_itself() -> None:
    alone = draw("sharegpt", 5, 1, num_clients=1, process="closed")
    ours = simulate(CONFIG, alone, make_graph=Keeping(1))
    assert ours.pools["colocated"].num_steps == 0
    assert ours.phase("transfer").max == 0.0 and ours.phase("decode").mean > 0.0
    assert ours.latency.mean < simulate(CONFIG, alone).latency.mean


def test_no_more_than_the_limit_is_kept() -> None:
    busy = draw("sharegpt", 30, 1, qps=2.0)
    results = [simulate(CONFIG, busy, make_graph=Keeping(limit)) for limit in (0, 1, 4)]
    batches = [result.pools["prefill"].mean_batch for result in results]
    assert 0.0 == batches[0] < batches[1] <= 1.0 < batches[2] <= 4.0
    assert results[0].latency == simulate(CONFIG, busy).latency
