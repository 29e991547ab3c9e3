"""The engine on a small random model: invariance to the batch, determinism, isolation of failures."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch

from backend.attention.kv_cache import KVCache
from backend.attention.sdpa import SdpaBackend
from backend.core.cache_policy import CACHE_POLICIES
from backend.core.logprobs import TokenLogprobs
from backend.core.page_pool import PagePool
from backend.core.request import Request, RequestStatus
from backend.core.sampling_params import UNMASKING, SamplingParams
from backend.core.scheduler import Scheduler, SchedulerConfig
from backend.engine.device_runner import DeviceRunner
from backend.engine.engine import Engine
from backend.engine.model_runner import ModelRunner
from backend.engine.step_limits import StepLimits
from backend.models.config import ModelConfig
from backend.models.loader import new_model

MASK, EOS = 60, 61
LLADA = ModelConfig("llada", 62, 64, 32, 48, 2, 4, 2, 512, 1e-5, 10000.0, MASK, (EOS,))
DREAM = replace(LLADA, architecture="dream", logits_shift=1)


def small_engine(
    tau: int | Literal["auto"] = 200,
    seqs: int = 32,
    pages: int = 600,
    page_size: int = 8,
    config: ModelConfig = LLADA,
    *,
    is_async: bool = False,
    graph_sizes: Sequence[int] = (),
    limits: StepLimits | None = None,
) -> Engine:
    """With `is_async` what runs on a GPU, on the CPU; with `graph_sizes` its graphs too, unrecorded."""
    torch.manual_seed(0)
    model = new_model(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    cache = KVCache(2, pages, page_size, 2, 8, torch.float32, torch.device("cpu"))
    attention = SdpaBackend(cache)
    on_device = DeviceRunner(model, cache, attention, seqs, graph_sizes, 256, limits) if is_async else None
    runner = ModelRunner(model, cache, attention, on_device)
    pool = PagePool(pages, page_size)
    scheduler = Scheduler(SchedulerConfig(tau, seqs), pool, config.logits_shift, runner.is_plain)
    return Engine(runner, scheduler, is_async)


@pytest.fixture(scope="module", params=[LLADA, DREAM], ids=["llada", "dream"])
def config(request: pytest.FixtureRequest) -> ModelConfig:
    shape: ModelConfig = request.param
    return shape


def mixed_requests(count: int, revises: bool = True) -> list[Request]:
    """Different lengths, blocks, cache policies, rules of unmasking, samplers and seeds."""
    rng = random.Random(1)
    policies = [*CACHE_POLICIES, "dual", "dual"]
    requests = []
    for i in range(count):
        block = rng.choice((1, 4, 8, 16, 32))
        blocks = rng.randint(1, 3)
        max_tokens = rng.randint(1, block * blocks)
        cache_policy = policies[i % len(policies)]
        params = SamplingParams(
            max_tokens=max_tokens,
            canvas_length=block * blocks,
            block_length=block,
            cache_policy=cache_policy,
            cache_refresh_interval=rng.choice((None, None, 0, 3)),
            cache_window=rng.randint(0, 5),
            unmasking="random" if cache_policy == "dkv-greedy" else rng.choice(UNMASKING),
            confidence_threshold=rng.choice((0.2, 0.5, 0.9)),
            factor=rng.choice((0.5, 1.0, 1.7)),
            steps_per_block=rng.randint(1, block),
            quota_schedule=rng.choice(("even", "timesteps")),
            temperature=rng.choice((0.0, 0.0, 0.7, 1.3)),
            top_k=rng.choice((0, 0, 5)),
            top_p=rng.choice((1.0, 0.8)),
            min_p=rng.choice((0.0, 0.05)),
            seed=rng.randint(-100, 100),
            stop_token_ids=rng.choice(((), (EOS, 5))),
            min_tokens=rng.choice((0, rng.randint(0, max_tokens))),
            remask_below=rng.choice((0.0, 0.0, 0.5)),
            logprobs=rng.choice((None, 0, 3)),
        )
        prompt = [rng.randrange(60) for _ in range(rng.randint(1, 70))]
        requests.append(Request(str(i), prompt, params, float(i), revises=revises))
    return requests


Logprobs = dict[str, dict[int, TokenLogprobs]]


def run(engine: Engine, requests: list[Request], told: Logprobs | None = None) -> dict[str, list[int]]:
    """The answers; `told` is filled with the logprobs of each, by response position."""
    for request in requests:
        engine.scheduler.add(request)
    answers: dict[str, list[int]] = {}
    while engine.scheduler.has_work:
        output = engine.step()
        assert output is not None
        for request in output.left:
            if told is not None:
                note(request, told)
            if request.status.is_finished:
                assert request.status in (RequestStatus.FINISHED_STOP, RequestStatus.FINISHED_LENGTH)
                answers[request.request_id] = request.answer()[0]
            else:
                request.next_block()
                engine.scheduler.add(request)
    engine.scheduler.pool.check()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages
    return answers


def note(request: Request, told: Logprobs) -> None:
    """What is known of the tokens of the current block that may be returned."""
    start = len(request.response)
    for offset in range(request.block.frontier):
        if request.params.logprobs is not None:
            told.setdefault(request.request_id, {})[start + offset] = request.block.logprobs[offset]
        else:
            assert not request.logprobs(start, request.block.frontier)


@pytest.fixture(scope="module")
def alone(config: ModelConfig) -> dict[str, list[int]]:
    engine = small_engine(config=config)
    return {k: v for request in mixed_requests(40) for k, v in run(engine, [request]).items()}


def logprobs_alone(config: ModelConfig = LLADA) -> Logprobs:
    told: Logprobs = {}
    engine = small_engine(config=config)
    for request in mixed_requests(40):
        run(engine, [request], told)
    return told


def test_answers_obey_their_limits(alone: dict[str, list[int]]) -> None:
    for request in mixed_requests(40):
        answer = alone[request.request_id]
        assert len(answer) <= request.params.max_tokens
        assert MASK not in answer and not set(answer) & set(request.params.stop_token_ids)
        assert len(answer) >= request.params.min_tokens
        if not request.params.stop_token_ids:
            assert len(answer) == request.params.max_tokens


@pytest.mark.parametrize(("tau", "seqs", "pages"), [(200, 32, 600), (10_000, 40, 2000), (40, 3, 60)])
def test_every_request_of_a_mixed_batch_equals_itself_alone(
    config: ModelConfig, alone: dict[str, list[int]], tau: int, seqs: int, pages: int
) -> None:
    requests = mixed_requests(40)
    random.Random(tau).shuffle(requests)
    assert run(small_engine(tau, seqs, pages, config=config), requests) == alone


def test_logprobs_are_the_same_in_a_mixed_batch(config: ModelConfig) -> None:
    told: Logprobs = {}
    answers = run(small_engine(config=config), mixed_requests(40), told)
    expected = logprobs_alone(config)
    assert told.keys() == expected.keys() and len(told) > 20
    for name, many in expected.items():
        params = mixed_requests(40)[int(name)].params
        assert len(many) >= len(answers[name])
        for position, token in enumerate(answers[name]):
            one, other = many[position], told[name][position]
            assert [t for t, _ in one.top] == [t for t, _ in other.top] and len(one.top) == params.logprobs
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            if params.temperature == 0 and params.logprobs:
                assert one.top[0] == (token, one.logprob), "the arg max of its step"


def test_scattered_pages_change_nothing(config: ModelConfig, alone: dict[str, list[int]]) -> None:
    engine = small_engine(config=config)
    holders = [engine.scheduler.pool.allocate(i, 1) for i in range(600)]
    assert None not in holders
    for i in range(0, 600, 2):
        engine.scheduler.pool.release(i)
    for request in mixed_requests(40):
        engine.scheduler.add(request)
        while engine.scheduler.has_work:
            output = engine.step()
            assert output is not None
            for left in output.left:
                if left.status.is_finished:
                    assert left.answer()[0] == alone[left.request_id]
                else:
                    left.next_block()
                    engine.scheduler.add(left)


@pytest.mark.parametrize("is_async", [False, True], ids=["host", "async"])
def test_a_retried_block_gives_the_same_answer(
    config: ModelConfig, alone: dict[str, list[int]], is_async: bool
) -> None:
    """The block is thrown away in the middle and started again, as after the loss of a worker."""
    engine = small_engine(config=config, is_async=is_async)
    told: Logprobs = {}
    num_retries = 0
    for request in mixed_requests(40):
        engine.scheduler.add(request)
        steps = 0
        while engine.scheduler.has_work:
            output = engine.step()
            assert output is not None
            steps += 1
            for left in output.left:
                note(left, told)
                if left.status.is_finished:
                    assert left.answer()[0] == alone[left.request_id]
                else:
                    left.next_block()
                    engine.scheduler.add(left)
            if steps % 3 == 0 and engine.scheduler.has_work and request.block.attempt == 1:
                engine.scheduler.abort(request.request_id)
                known = request.block.committed_prefix()
                num_retries += 1
                request.status = RequestStatus.DENOISING
                request.retry_block(known)
                engine.scheduler.add(request)
    assert num_retries > 10
    expected = logprobs_alone(config)
    assert told.keys() == expected.keys()
    for name, many in expected.items():
        for position, one in many.items():
            assert told[name][position].logprob == pytest.approx(one.logprob, abs=1e-4)


def test_broken_logits_fail_one_request_and_leave_the_others(config: ModelConfig, alone: dict[str, list[int]]) -> None:
    engine = small_engine(config=config)
    # Poison: its embedding makes every logit of its own sequence NaN. Outside the vocabulary, so that
    # no request writes it itself, past the end of its answer for instance.
    poison = config.embedding_size - 1
    engine.runner.model.embedding.weight[poison] = torch.nan
    requests = mixed_requests(40)[:6]
    poisoned = Request("bad", [1, poison, 2], requests[0].params, 0.5)
    for request in (*requests, poisoned):
        engine.scheduler.add(request)
    errors: dict[str, str] = {}
    while engine.scheduler.has_work:
        output = engine.step()
        assert output is not None
        errors |= output.errors
        for left in output.left:
            if not left.status.is_finished:
                left.next_block()
                engine.scheduler.add(left)
            elif left is poisoned:
                assert left.status is RequestStatus.FINISHED_ERROR
            else:
                assert left.answer()[0] == alone[left.request_id]
    assert list(errors) == ["bad"] and "not finite" in errors["bad"]


def test_logits_are_computed_only_where_tokens_may_be_unmasked(config: ModelConfig) -> None:
    engine = small_engine(config=config)
    asked: list[int] = []
    model = engine.runner.model
    whole = model.logits
    model.logits = lambda hidden: asked.append(len(hidden)) or whole(hidden)  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=32, canvas_length=64, unmasking="quota", steps_per_block=2)
    engine.scheduler.add(Request("a", [1] * 100, params, 0.0))
    while engine.scheduler.has_work:
        engine.step()
    # Never less than 16 rows on the CPU; Dream's prefill asks for one.
    assert asked == ([16, 31, 16] if config.logits_shift else [32, 16])
