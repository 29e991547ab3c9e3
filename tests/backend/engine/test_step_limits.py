"""Steps that are larger than memory was set aside for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.queries import num_query_tokens
from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.core.step import StepPlan
from backend.engine.device_runner import DeviceRunner
from backend.engine.running_step import RunningStep
from backend.engine.step_limits import StepLimits
from backend.models.config import ModelConfig
from tests.backend.engine.test_engine import DREAM, LLADA, mixed_requests, run, small_engine


def request(name: str, prompt: int, blocks: int, policy: str, is_prefilled: bool) -> Request:
    params = SamplingParams(8 * blocks, 8 * blocks, 8, steps_per_block=8, cache_policy=policy)
    made = Request(name, [0] * prompt, params, 0.0)
    if is_prefilled:
        made.commit([])
    return made


REQUESTS = st.tuples(st.integers(1, 60), st.integers(1, 6), st.sampled_from(["dual", "prefix", "dkv-prefill"]))


@given(st.lists(REQUESTS, max_size=5), st.lists(REQUESTS, max_size=12), st.integers(8, 200), st.integers(8, 60))
def test_parts_are_the_step_in_order_and_within_the_limits(
    prefills: list[tuple[int, int, str]], decodes: list[tuple[int, int, str]], num_tokens: int, num_positions: int
) -> None:
    whole = StepPlan(
        [request(f"p{i}", *given, False) for i, given in enumerate(prefills)],
        [request(f"d{i}", *given, True) for i, given in enumerate(decodes)],
    )
    whole.decode_tokens = sum(num_query_tokens(decode, 0) for decode in whole.decodes)
    parts = StepLimits(num_tokens, num_positions).parts(whole, 0)
    assert [r for part in parts for r in (*part.prefills, *part.decodes)] == [*whole.prefills, *whole.decodes]
    assert sum(part.decode_tokens for part in parts) == whole.decode_tokens

    def fits(part: StepPlan) -> bool:
        tokens = part.decode_tokens + sum(prefill.sequence_length for prefill in part.prefills)
        return (
            tokens <= num_tokens and sum(r.block.num_masked for r in (*part.prefills, *part.decodes)) <= num_positions
        )

    assert all(fits(part) or len(part.prefills) + len(part.decodes) == 1 for part in parts)
    assert (parts == [whole]) == (fits(whole) or len(whole.prefills) + len(whole.decodes) == 1)


def test_decodes_whose_prefill_still_runs_count_as_decodes() -> None:
    decodes = [request(f"d{i}", 80, 1, "dual", False) for i in range(4)]
    plan = StepPlan([request("p", 330, 1, "dual", False)], decodes, 32)
    parts = StepLimits(360, 1000).parts(plan, 0)
    assert [(len(part.prefills), len(part.decodes), part.decode_tokens) for part in parts] == [(1, 2, 16), (0, 2, 16)]


@pytest.mark.parametrize("graph_sizes", [(), (1, 4, 16)], ids=["packed", "graphs"])
@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_the_same_tokens(config: ModelConfig, graph_sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"steps": 0, "forwards": 0}
    launch, one = DeviceRunner.launch, DeviceRunner._launch

    def launching(self: DeviceRunner, *args: Any) -> Any:
        counts["steps"] += 1
        return launch(self, *args)

    def launching_one(self: DeviceRunner, *args: Any) -> RunningStep:
        counts["forwards"] += 1
        return one(self, *args)

    expected = run(small_engine(config=config), mixed_requests(30))
    monkeypatch.setattr(DeviceRunner, "launch", launching)
    monkeypatch.setattr(DeviceRunner, "_launch", launching_one)
    limits = StepLimits(120, 70)
    engine = small_engine(config=config, is_async=True, graph_sizes=graph_sizes, limits=limits)
    assert run(engine, mixed_requests(30)) == expected
    assert counts["forwards"] > 1.2 * counts["steps"]


def test_kv_of_a_layer_is_told_of_when_all_prefills_have_written_it() -> None:
    engine = small_engine(is_async=True, limits=StepLimits(40, 64))
    for i in range(3):
        engine.scheduler.add(request(str(i), 30, 1, "dual", False))
    told: list[int] = []
    begun: list[str] = []
    one = DeviceRunner._launch
    assert engine.runner.on_device is not None

    def launching_one(plan: StepPlan, *args: Any) -> RunningStep:
        begun.extend(prefill.request_id for prefill in plan.prefills)
        return one(engine.runner.on_device, plan, *args)  # type: ignore[arg-type]

    engine.runner.on_device._launch = launching_one  # type: ignore[method-assign]

    def on_layer(layer: int) -> None:
        assert begun == ["0", "1", "2"]
        told.append(layer)

    engine.step(lambda plan: on_layer if plan.prefills else lambda _: None)
    assert told == [0, 1]
