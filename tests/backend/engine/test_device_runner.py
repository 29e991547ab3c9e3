"""One step of requests in seats and of others: who is unmasked where."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.core.step import StepPlan
from backend.core.synchronized_scheduler import SynchronizedScheduler, SynchronizedSchedulerConfig
from backend.engine.block_state import BlockState
from backend.engine.device_runner import DeviceRunner
from backend.engine.engine import Engine
from backend.engine.host_choice import HostChoice
from backend.engine.running_step import RunningStep
from backend.models.config import ModelConfig
from backend.sampling.seats import Seats
from tests.backend.engine.test_async_scheduling import plain_requests
from tests.backend.engine.test_engine import DREAM, LLADA, run, small_engine


@pytest.fixture(scope="module", params=[LLADA, DREAM], ids=["llada", "dream"])
def config(request: pytest.FixtureRequest) -> ModelConfig:
    shape: ModelConfig = request.param
    return shape


ODD: list[dict[str, Any]] = [
    {"cache_policy": "none"},
    {"cache_policy": "dkv-decode"},
    {"cache_policy": "dkv-greedy", "unmasking": "random"},
    {"cache_refresh_interval": 2},
    {"remask_below": 0.5},
    {"block_length": 128},
]


@pytest.mark.parametrize("options", ODD, ids=lambda options: " ".join(options))
def test_others_keep_their_seats_beside_one_that_has_none(
    config: ModelConfig, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def requests() -> list[Request]:
        params = SamplingParams(128, 128, **{"steps_per_block": 32, **options})
        return [Request("odd", [5, 6, 7], params, 0.0), *plain_requests(8)]

    expected = run(small_engine(config=config), requests())
    seated: Counter[tuple[str, int]] = Counter()
    hosted: set[str] = set()
    beside: list[int] = []
    take, launch, init = Seats.take, DeviceRunner.launch, HostChoice.__init__

    def taking(self: Seats, seats: list[int], requests: list[Request]) -> None:
        seated.update((request.request_id, request.block.index) for request in requests)
        take(self, seats, requests)

    def choosing(self: HostChoice, states: list[BlockState], *args: Any) -> None:
        hosted.update(state.request.request_id for state in states)
        init(self, states, *args)

    def launching(self: DeviceRunner, plan: StepPlan, *args: Any) -> RunningStep:
        names = [request.request_id for request in (*plan.prefills, *plan.decodes)]
        beside.append(len(names) - 1 if "odd" in names else 0)
        return launch(self, plan, *args)

    monkeypatch.setattr(Seats, "take", taking)
    monkeypatch.setattr(HostChoice, "__init__", choosing)
    monkeypatch.setattr(DeviceRunner, "launch", launching)
    assert run(small_engine(seqs=9, config=config, is_async=True), requests()) == expected
    assert sum(map(bool, beside)) > 5, "there are such steps"
    assert hosted == {"odd"}
    assert set(seated.values()) == {1} and "odd" not in {name for name, _ in seated}


def test_steps_of_requests_without_a_seat_alone(config: ModelConfig) -> None:
    def requests() -> list[Request]:
        return [Request("0", [5, 6], SamplingParams(64, 64, cache_policy="none"), 0.0)]

    engine = small_engine(config=config, is_async=True)
    assert run(engine, requests()) == run(small_engine(config=config), requests())


def test_more_requests_in_a_step_than_seats(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a prefill worker whose sequences are very short; batches that move in lockstep have decodes as well."""

    def engine(is_async: bool) -> Engine:
        engine = small_engine(seqs=3, config=config, is_async=is_async)
        settings = SynchronizedSchedulerConfig(batch_size=8, batch_timeout_s=0.0)
        engine.scheduler = SynchronizedScheduler(settings, engine.scheduler.pool, config.logits_shift)
        return engine

    expected = run(engine(False), plain_requests(24))
    hosted: Counter[int] = Counter()
    init = HostChoice.__init__

    def choosing(self: HostChoice, states: list[BlockState], *args: Any) -> None:
        hosted[len(states)] += 1
        init(self, states, *args)

    monkeypatch.setattr(HostChoice, "__init__", choosing)
    assert run(engine(True), plain_requests(24)) == expected
    assert hosted[8 - 3] > 2 and max(hosted) == 8 - 3


@pytest.mark.parametrize("num_threads", [2, 9])
def test_any_number_of_threads(num_threads: int) -> None:
    """What a CPU pads to follows from it."""
    params = SamplingParams(32, 32)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        answers = [run(small_engine(seqs=1, is_async=a), [Request("0", [5, 6], params, 0.0)]) for a in (False, True)]
    finally:
        torch.set_num_threads(before)
    assert answers[0] == answers[1]
