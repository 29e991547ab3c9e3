from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from benchmarks.beyond.overlap import Overlap, Overlapped
from benchmarks.simulator.config import calibrated
from benchmarks.simulator.simulate import simulate
from benchmarks.simulator.timing import Modelled
from benchmarks.simulator.workload import draw

CONFIG = calibrated("llada-8b", "sharegpt", num_prefill=1, num_colocated=1)
HANDED_OVER = Request("r/0.1", (1,) * 1307, SamplingParams(512, 512), 0.0, prefilled=[(0, 1)])
FLIGHT = cast(Any, SimpleNamespace(num_tokens=1819, request=HANDED_OVER))


def test_one_layer_is_left_of_a_transfer_that_is_faster_than_its_prefill() -> None:
    whole_s = Modelled(CONFIG, 32).transfer_s(FLIGHT)
    assert Overlapped(CONFIG, 32).transfer_s(FLIGHT) == pytest.approx(whole_s / CONFIG.shape.layers)


def test_what_does_not_fit_beside_the_prefill_is_left() -> None:
    slow = replace(CONFIG, link_efficiency=0.01)
    prefill_s = slow.step_latency(32).step_s([1819], 0, 0)
    left_s = slow.transfer_latency_s(1819) - Overlapped(slow, 32).transfer_s(FLIGHT)
    assert left_s == pytest.approx(prefill_s * 31 / 32)


def test_requests_are_faster_with_it() -> None:
    workload = draw("sharegpt", 10, 1, qps=0.5)
    ours = simulate(CONFIG, workload, make_graph=Overlap())
    assert ours.latency.mean < simulate(CONFIG, workload).latency.mean
