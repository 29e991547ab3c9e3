from __future__ import annotations

import pytest

from benchmarks.beyond import one_router
from benchmarks.beyond.ideas import BASELINES
from benchmarks.beyond.scale import run_of
from benchmarks.simulator.simulate import simulate


def test_every_block_is_counted_once_and_decisions_stay_as_they_are() -> None:
    hybrid = BASELINES[1]
    cost = one_router.measure(hybrid, 8, 5.0, 1)
    run = run_of(hybrid, 8, 1, duration_s=5.0)
    plain = simulate(run.config, run.workload)
    blocks = float(plain.requests["num_blocks"].mean())
    assert cost.num_requests == len(run.workload.lengths) == round(5 * hybrid.knee)
    assert cost.blocks_per_s == pytest.approx(hybrid.knee * blocks)
    assert cost.mean_s == plain.latency.mean
    assert 1e-6 < cost.block_s < 1e-2
    assert cost.max_workers * cost.cores == pytest.approx(8)


def test_a_table_for_each_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert one_router.main(["--workers", "8,16", "--worker-seconds", "16", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| 8 |") == printed.count("| 16 |") == 2
