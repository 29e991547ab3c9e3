"""Steps that are launched before the results of the ones before are known: the same tokens."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from backend.core.queries import is_steady
from backend.core.request import Request, RequestStatus
from backend.core.sampling_params import SamplingParams
from backend.core.step import StepResult
from backend.engine.decode_graphs import DecodeGraphs
from backend.engine.device_runner import DeviceRunner
from backend.engine.engine import Engine
from backend.engine.host_choice import HostChoice
from backend.engine.model_runner import ModelRunner
from backend.engine.running_step import RunningStep
from backend.models.config import ModelConfig
from tests.backend.engine.test_engine import DREAM, EOS, LLADA, Logprobs, mixed_requests, run, small_engine


@pytest.fixture(scope="module", params=[LLADA, DREAM], ids=["llada", "dream"])
def config(request: pytest.FixtureRequest) -> ModelConfig:
    shape: ModelConfig = request.param
    return shape


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each way to run a step was taken, and how many were launched while another one ran."""
    counts: Counter[str] = Counter()

    def count(what: str, owner: type, name: str) -> None:
        original = getattr(owner, name)

        def counting(self: object, *args: object, **kwargs: object) -> object:
            counts[what] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count("host step", ModelRunner, "run")
    count("host choice", HostChoice, "choose")
    count("graphs", DecodeGraphs, "run")
    launch = DeviceRunner.launch

    def launching(self: DeviceRunner, *args: Any) -> RunningStep:
        step = launch(self, *args)
        counts["ahead"] += counts["running"] > 0
        counts["running"] += 1
        return step

    def ending(self: RunningStep) -> StepResult:
        counts["running"] -= 1
        return result(self)

    result = RunningStep.result
    monkeypatch.setattr(DeviceRunner, "launch", launching)
    monkeypatch.setattr(RunningStep, "result", ending)
    return counts


def plain_requests(count: int = 40) -> list[Request]:
    rng = random.Random(2)
    requests = []
    for i in range(count):
        block = rng.choice((8, 32, 32, 32))
        blocks = rng.randint(1, 3)
        params = SamplingParams(
            max_tokens=rng.randint(1, block * blocks),
            canvas_length=block * blocks,
            block_length=block,
            cache_policy=rng.choice(("dual", "dual", "prefix")),
            unmasking=rng.choice(("threshold", "threshold", "factor", "quota", "entropy", "margin", "random")),
            confidence_threshold=rng.choice((0.2, 0.5, 0.9)),
            steps_per_block=rng.randint(1, block),
            quota_schedule=rng.choice(("even", "timesteps")),
            temperature=rng.choice((0.0, 0.0, 0.7)),
            seed=rng.randint(-100, 100),
            stop_token_ids=rng.choice(((), (EOS, 5))),
        )
        prompt = [rng.randrange(60) for _ in range(rng.randint(1, 70))]
        requests.append(Request(str(i), prompt, params, float(i)))
    return requests


@pytest.fixture(scope="module")
def expected(config: ModelConfig) -> dict[str, list[int]]:
    """By host sampling, step by step."""
    return run(small_engine(config=config), plain_requests())


@pytest.mark.parametrize("graph_sizes", [(), (1, 4, 16, 32)], ids=["packed", "graphs"])
def test_the_same_tokens(
    config: ModelConfig, expected: dict[str, list[int]], graph_sizes: tuple[int, ...], counted: Counter[str]
) -> None:
    engine = small_engine(config=config, is_async=True, graph_sizes=graph_sizes)
    assert run(engine, plain_requests()) == expected
    assert bool(counted["graphs"]) == bool(graph_sizes)
    assert not counted["host step"] and not counted["host choice"] and counted["ahead"] > 50


def test_the_same_tokens_when_each_step_is_waited_for(config: ModelConfig, expected: dict[str, list[int]]) -> None:
    engine = small_engine(config=config, is_async=True)
    assert run(Engine(engine.runner, engine.scheduler), plain_requests()) == expected


def test_with_a_budget_that_tunes_itself(config: ModelConfig, expected: dict[str, list[int]]) -> None:
    assert run(small_engine("auto", 8, config=config, is_async=True), plain_requests()) == expected


def test_with_few_pages_and_seats(config: ModelConfig, expected: dict[str, list[int]]) -> None:
    assert run(small_engine(60, 3, 60, config=config, is_async=True), plain_requests()) == expected


def steady_requests() -> list[Request]:
    """All rules and samplers, with and without logprobs, of blocks whose steps all compute the same positions."""
    return [request for request in mixed_requests(160) if is_steady(request)]


def same_logprobs(told: Logprobs, expected: Logprobs) -> None:
    assert told.keys() == expected.keys()
    for name, of in told.items():
        assert of.keys() == expected[name].keys()
        for at, one in of.items():
            assert one.logprob == pytest.approx(expected[name][at].logprob, abs=1e-5)


@pytest.mark.parametrize("seqs", [32, 4])
@pytest.mark.parametrize("graph_sizes", [(), (1, 4, 32)], ids=["packed", "graphs"])
@pytest.mark.parametrize("are_steady", [False, True], ids=["all policies", "steady"])
def test_with_requests_that_need_the_host_among_them(
    config: ModelConfig, seqs: int, graph_sizes: tuple[int, ...], are_steady: bool, counted: Counter[str]
) -> None:
    """Their tokens are chosen there; the forward is everybody's."""
    requests = steady_requests if are_steady else lambda: mixed_requests(40)
    expected_logprobs: Logprobs = {}
    expected = run(small_engine(config=config), requests(), expected_logprobs)
    logprobs: Logprobs = {}
    engine = small_engine(seqs=seqs, config=config, is_async=True, graph_sizes=graph_sizes)
    counted.clear()
    assert run(engine, requests(), logprobs) == expected
    assert counted["host choice"] > 20 and not counted["host step"]
    same_logprobs(logprobs, expected_logprobs)


@pytest.mark.parametrize("graph_sizes", [(), (1, 4, 32)], ids=["packed", "graphs"])
def test_tokens_that_an_earlier_attempt_streamed_stand_with_all_policies_and_rules(
    config: ModelConfig, graph_sizes: tuple[int, ...]
) -> None:
    def requests() -> list[Request]:
        some = mixed_requests(80)
        for i, request in enumerate(some):
            request.block.known = tuple((i + at) % 60 for at in range(i % (request.block.length + 1)))
        return some

    expected_logprobs: Logprobs = {}
    expected = run(small_engine(config=config), requests(), expected_logprobs)
    logprobs: Logprobs = {}
    assert run(small_engine(config=config, is_async=True, graph_sizes=graph_sizes), requests(), logprobs) == expected
    same_logprobs(logprobs, expected_logprobs)
    for request in requests():
        answer, known = expected[request.request_id], request.block.known
        if not request.params.remask_below:
            assert tuple(answer[: len(known)]) == known[: len(answer)]


@pytest.mark.parametrize("block_length", [8, 16, 32])
def test_what_has_the_length_of_a_graph_s_block_by_chance_is_packed(config: ModelConfig, block_length: int) -> None:
    """`prefix` computes what is left of the canvas: as many positions as the graph's blocks have, but no such block."""

    def requests() -> list[Request]:
        params = SamplingParams(
            64, 64, block_length, cache_policy="prefix", confidence_threshold=0.3, steps_per_block=block_length
        )
        return [Request(str(i), [5, i, 7], params, float(i)) for i in range(3)]

    expected = run(small_engine(config=config), requests())
    assert run(small_engine(config=config, is_async=True, graph_sizes=(1, 4)), requests()) == expected


def test_a_default_block_too_long_for_a_seat_is_not_recorded(config: ModelConfig) -> None:
    long = replace(config, defaults={"block_length": 128})
    on_device = small_engine(config=long, is_async=True, graph_sizes=(1, 4)).runner.on_device
    assert on_device is not None and on_device.graphs is None


def test_an_id_that_comes_again_while_its_step_runs_is_another_request(config: ModelConfig) -> None:
    engine = small_engine(config=config, is_async=True)
    params = SamplingParams(32, 32, unmasking="quota", steps_per_block=32)
    old, new = (Request("same", [token] * 9, params, 0.0) for token in (3, 4))
    engine.scheduler.add(old)
    for _ in range(3):
        engine.step()
    engine.scheduler.abort("same")
    engine.scheduler.add(new)
    ran: list[Request] = []
    while engine.scheduler.has_work:
        output = engine.step()
        assert output is not None
        ran += output.plan.prefills + output.plan.decodes  # type: ignore[operator]
    assert set(ran) == {new} and len(ran) == 32, "the old one's last step concerns nobody"
    alone = Request("alone", [4] * 9, params, 0.0)
    run(small_engine(config=config), [alone])
    assert new.block.tokens == alone.block.tokens
    engine.scheduler.pool.check()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages


def test_logits_that_are_not_finite_fail_their_request_alone(config: ModelConfig) -> None:
    engine = small_engine(config=config, is_async=True)
    model = engine.runner.model
    good, bad = (Request(n, [t] * 9, SamplingParams(32, 32), 0.0) for n, t in (("good", 3), ("bad", 63)))
    with torch.no_grad():
        model.embedding.weight[63] = torch.nan  # no token, so the other one never gets it
    for request in (good, bad):
        engine.scheduler.add(request)
    left: dict[str, Request] = {}
    while engine.scheduler.has_work:
        output = engine.step()
        assert output is not None
        left |= {request.request_id: request for request in output.left}
    assert left == {"good": good, "bad": bad}
    assert bad.status is RequestStatus.FINISHED_ERROR and "not finite" in str(bad.error)
    alone = Request("good", [3] * 9, SamplingParams(32, 32), 0.0)
    run(small_engine(config=config), [alone])
    assert good.error is None and good.answer() == alone.answer()
