"""Offline batches on the demonstration model: the same answers as one request at a time, whatever else runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.core.scheduler import SchedulerConfig
from backend.core.synchronized_scheduler import SynchronizedSchedulerConfig
from backend.engine.engine import AnySchedulerConfig, Engine, EngineConfig
from components.config import DEMO_MODELS
from components.offline import Answer, Job, OfflineBatch
from components.text import TextProcessor
from tests.e2e.reference import END, Reference

TEXT = TextProcessor(DEMO_MODELS["demo"])
SANGAM = SchedulerConfig(600, 64)
PROMPTS = ("count from 7 to 40", "spell pear", "write 147 in words", "what is 31 plus 7?", "count from 2 to 60")


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(DEMO_MODELS["demo"])


def engine(config: AnySchedulerConfig = SANGAM, tokens: int = 4096, is_async: bool = False) -> Engine:
    return Engine.from_config(
        EngineConfig(DEMO_MODELS["demo"], config, kv_cache_tokens=tokens, async_scheduling=is_async)
    )


def job(index: int, prompt: str, stop: tuple[str, ...] = (), max_tokens: int = 128, **params: Any) -> Job:
    options = SamplingParams(max_tokens, -(-max_tokens // 32) * 32, stop_token_ids=(END,), **params)
    request = Request(str(index), TEXT.encode_chat(prompt), options, float(index))
    return Job(index, request, stop, f"id {index}")


def answers(engine: Engine, jobs: list[Job | Answer], look_ahead: int = 8) -> dict[int, Answer]:
    batch = OfflineBatch(engine, TEXT.tokenizer, jobs, look_ahead)
    found: dict[int, Answer] = {}
    while (ended := batch.step()) is not None:
        engine.scheduler.pool.check()
        for answer in ended:
            assert answer.index not in found
            found[answer.index] = answer
    assert not engine.scheduler.has_work and engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages
    assert batch.step() is None
    return found


@pytest.mark.parametrize(
    ("config", "is_async"),
    [
        (SANGAM, False),
        (SANGAM, True),
        (SchedulerConfig(600, 1), False),
        (SynchronizedSchedulerConfig(4, 0.0), False),
        (SynchronizedSchedulerConfig(16, 0.05), False),
    ],
    ids=["sangam", "launched ahead", "one at a time", "synchronized", "synchronized, never full"],
)
def test_the_same_answers_as_one_request_at_a_time(
    config: AnySchedulerConfig, is_async: bool, reference: Reference
) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"unmasking": "quota", "steps_per_block": 4},
        {"temperature": 0.7, "seed": 3},
        {"max_tokens": 20},
    ]
    asked = list(itertools.product(PROMPTS, options))
    jobs: list[Job | Answer] = [job(i, prompt, **params) for i, (prompt, params) in enumerate(asked)]
    found = answers(engine(config, is_async=is_async), jobs)
    for i, (prompt, params) in enumerate(asked):
        expected = reference.chat(prompt, **params)
        assert (found[i].text, list(found[i].tokens)) == (expected.text, expected.tokens)
        assert (found[i].finish_reason, found[i].num_forwards) == (expected.finish_reason, expected.num_steps)
        assert (found[i].num_prompt_tokens, found[i].custom_id) == (expected.num_prompt_tokens, f"id {i}")


@pytest.mark.parametrize(
    ("config", "is_async"),
    [(SchedulerConfig(600, 4), False), (SchedulerConfig(600, 4), True), (SynchronizedSchedulerConfig(4, 0.0), False)],
)
def test_a_stop_string_ends_an_answer_and_frees_its_place(
    config: AnySchedulerConfig, is_async: bool, reference: Reference
) -> None:
    slow = {"unmasking": "quota", "steps_per_block": 32}
    jobs = [job(i, "count from 7 to 40", (stop,) if stop else (), **slow) for i, stop in enumerate(("12 13", "38", ""))]
    found = answers(engine(config, is_async=is_async), [*jobs, job(3, "count from 2 to 60", ("33",))])
    whole = reference.chat("count from 7 to 40", **slow)
    assert found[0].text == "7 8 9 10 11 " and found[0].finish_reason == "stop"
    assert list(found[0].tokens) == whole.tokens[:7]  # up to the one that completes the stop string
    assert found[0].num_forwards < 32
    assert found[1].text == whole.text.partition("38")[0]
    assert found[2].text == whole.text
    assert found[3].text == reference.chat("count from 2 to 60").text.partition("33")[0]


def test_jobs_are_drawn_no_further_ahead_than_needed() -> None:
    drawn = 0

    def jobs() -> Iterator[Job]:
        nonlocal drawn
        for index in range(50):
            drawn += 1
            yield job(index, "spell pear")

    batch = OfflineBatch(engine(SchedulerConfig(600, 2)), TEXT.tokenizer, jobs(), 3)
    num_ended = 0
    while (ended := batch.step()) is not None:
        num_ended += len(ended)
        assert drawn <= num_ended + 2 + 3
    assert num_ended == 50 and batch.num_forwards >= 50 > batch.num_steps


def test_what_fails_harms_nobody_else(reference: Reference) -> None:
    broken = engine(tokens=256)
    model = broken.runner.model
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)  # not tied any more
    model.embedding.weight[5] = torch.nan
    params = SamplingParams(32, 32, stop_token_ids=(END,))
    jobs: list[Job | Answer] = [
        Answer(0, "bad line", error="the line is not JSON"),
        job(1, "spell pear", max_tokens=32),
        Job(2, Request("2", [3] * 300, params, 2.0)),
        Job(3, Request("3", [3, 5, 4], params, 3.0), custom_id="poison"),
        *(Answer(index, error="no") for index in range(4, 40)),
        job(40, "what is 31 plus 7?", max_tokens=32),
    ]
    found = answers(broken, jobs)
    assert found[0].error == "the line is not JSON"
    assert "332 tokens do not fit the KV cache of 256 tokens" in found[2].error
    assert "not finite" in found[3].error and found[3].custom_id == "poison"
    assert len(found) == 41
    for index, prompt in ((1, "spell pear"), (40, "what is 31 plus 7?")):
        assert found[index].text == reference.chat(prompt, 32).text and not found[index].error


def test_nothing_to_answer() -> None:
    assert OfflineBatch(engine(), TEXT.tokenizer, []).step() is None
