from __future__ import annotations

import statistics

import pytest

from benchmarks.gpu.busy import share_covered
from benchmarks.gpu.roofline import decode_s, prefill_s
from benchmarks.gpu.serving import Job, jobs, queued, rate_at_latency
from benchmarks.lengths import Length
from benchmarks.simulator.hardware import gpus, models


def load(*arrivals: float) -> list[Job]:
    return [Job(i, at, Length(1, 1), 32, (1,)) for i, at in enumerate(arrivals)]


def test_one_after_the_other() -> None:
    assert queued(load(0.0, 1.0, 10.0), (4.0, 2.0, 1.0)) == [4.0, 5.0, 1.0]


def test_the_rate_of_a_mean_latency_is_the_one_that_gives_it() -> None:
    made = jobs("sharegpt", 1.0, 50, 10.0, seed=3)
    services = [0.2 + 0.01 * i for i in range(50)]
    rate = rate_at_latency(made, services, 2.0)
    stretch = 50 / made[-1].arrival / rate
    stretched = [Job(j.index, j.arrival * stretch, j.length, j.canvas_length, j.steps) for j in made]
    assert statistics.fmean(queued(stretched, services)) == pytest.approx(2.0, rel=0.01)
    assert rate_at_latency(made, services, 0.3) == 0.0, "slower than that without any load"


def test_a_load_is_the_trace_s() -> None:
    made = jobs("arxiv", 2.0, 40, 13.0, seed=1)
    assert [job.arrival for job in made] == sorted(job.arrival for job in made)
    for job in made:
        assert job.canvas_length == 512 and len(job.steps) == -(-job.length.num_output_tokens // 32)
        assert all(1 <= steps <= 32 for steps in job.steps)


def test_the_share_that_spans_cover() -> None:
    assert share_covered([(0.0, 4.0)]) == 1.0
    assert share_covered([(5.0, 10.0), (0.0, 2.0), (1.0, 4.0), (6.0, 7.0)]) == pytest.approx(0.9)


def test_the_roofline_by_hand() -> None:
    """LLaDA-8B on an H100: reading 6.979e9 weights and the head in bfloat16 takes what 3.35 TB/s take."""
    model, gpu = models()["llada-8b"], gpus()["h100"]
    weights = 2 * (6.979e9 + 4096 * 126464)
    assert decode_s(model, gpu, 1, 1) == pytest.approx((weights + 2 * 32 * 126464 + 524288) / 3.35e12, rel=1e-3)
    flops = 2 * 6.979e9 * 1819 + 2 * 32 * 4096 * 126464 + 4 * 4096 * 32 * 1819**2
    assert prefill_s(model, gpu, 1819) == pytest.approx(flops / 989.4e12, rel=1e-3)
