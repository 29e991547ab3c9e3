"""Options that only diffusion models have, by every way in, with an effect that can be seen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.e2e.reference import Reference
from tests.e2e.served import MODEL_NAME, Served

pytestmark = pytest.mark.e2e

PROMPT = "spell lily"
BODY = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 32, "ignore_eos": True}


def _num_steps(graph: Served) -> float:
    return sum(graph.metrics(worker)["sangam_worker_block_steps_sum"] for worker in graph.workers())


def by_annotation(graph: Served, options: dict[str, str]) -> str:
    annotations = [f"dllm.{key}:{value}" for key, value in options.items()]
    reply = graph.post("/v1/chat/completions", {**BODY, "nvext": {"annotations": annotations}})
    return reply.json()["choices"][0]["message"]["content"] if reply.ok else _error(reply)


def by_header(graph: Served, options: dict[str, str]) -> str:
    headers = {f"x-dynamo-meta-{key}": value for key, value in options.items()}
    reply = graph.post("/v1/chat/completions", BODY, headers=headers)
    return reply.json()["choices"][0]["message"]["content"] if reply.ok else _error(reply)


def by_openai_client(graph: Served, options: dict[str, str]) -> str:
    annotations = [f"dllm.{key}:{value}" for key, value in options.items()]
    reply = graph.openai.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=32,
        extra_body={"ignore_eos": True, "nvext": {"annotations": annotations}},
    )
    return reply.choices[0].message.content or ""


def by_kserve_parameter(graph: Served, options: dict[str, str]) -> str:
    def typed(value: str) -> int | float | str:
        for kind in (int, float):
            with suppress(ValueError):
                return kind(value)
        return value

    parameters = {key: typed(value) for key, value in options.items()}
    return _kserve(graph, {"max_tokens": 32, "ignore_eos": True, **parameters}, {})


def by_kserve_header(graph: Served, options: dict[str, str]) -> str:
    headers = {f"x-dynamo-meta-{key}": value for key, value in options.items()}
    return _kserve(graph, {"max_tokens": 32, "ignore_eos": True}, headers)


def _kserve(graph: Served, parameters: dict[str, Any], headers: dict[str, str]) -> str:
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([PROMPT.encode()], dtype=np.object_))
    with triton.InferenceServerClient(graph.grpc) as client:
        try:
            result = client.infer(MODEL_NAME, [tensor], parameters=parameters, headers=headers)
        except triton.InferenceServerException as error:
            return f"error: {error.message()}"
    text: bytes = result.as_numpy("text_output")[0]
    return text.decode()


def _error(reply: Any) -> str:
    assert reply.status_code == 400, reply.text
    return f"error: {reply.json()['message']}"


WAYS: list[Callable[[Served, dict[str, str]], str]] = [by_annotation, by_header, by_kserve_parameter, by_kserve_header]


@pytest.mark.parametrize("ask", [*WAYS, by_openai_client])
def test_a_quota_takes_exactly_its_steps(
    graph: Served, reference: Reference, ask: Callable[[Served, dict[str, str]], str]
) -> None:
    for steps in (4, 32):
        before = _num_steps(graph)
        answer = ask(graph, {"unmasking": "quota", "steps_per_block": str(steps)})
        expected = reference.chat(PROMPT, 32, ignore_eos=True, unmasking="quota", steps_per_block=steps)
        assert answer == expected.text
        assert _num_steps(graph) - before == expected.num_steps == steps


@pytest.mark.parametrize("ask", WAYS)
def test_a_threshold_of_0_commits_everything_at_once(
    graph: Served, ask: Callable[[Served, dict[str, str]], str]
) -> None:
    before = _num_steps(graph)
    answer = ask(graph, {"confidence_threshold": "0.0"})
    assert not answer.startswith("error: "), answer
    assert _num_steps(graph) - before == 1


@pytest.mark.parametrize("ask", WAYS)
def test_a_block_length_of_8_makes_four_blocks(
    graph: Served, reference: Reference, ask: Callable[[Served, dict[str, str]], str]
) -> None:
    def num_blocks() -> float:
        name = 'sangam_worker_blocks_total{outcome="done"}'
        return sum(graph.metrics(worker).get(name, 0) for worker in graph.workers())

    before = num_blocks()
    answer = ask(graph, {"block_length": "8"})
    expected = reference.chat(PROMPT, 32, ignore_eos=True, block_length=8, steps_per_block=8)
    assert answer == expected.text
    assert num_blocks() - before == 4


def test_an_annotation_wins_over_a_header(graph: Served) -> None:
    before = _num_steps(graph)
    nvext = {"annotations": ["dllm.unmasking:quota", "dllm.steps_per_block:4"]}
    reply = graph.post(
        "/v1/chat/completions", {**BODY, "nvext": nvext}, headers={"x-dynamo-meta-steps_per_block": "16"}
    )
    assert reply.ok, reply.text
    assert _num_steps(graph) - before == 4


BAD = [
    ("block_length", "0", "from 1 to 256"),
    ("block_length", "257", "from 1 to 256"),
    ("steps_per_block", "33", "from 1 to 32"),
    ("steps_per_block", "many", "from 1 to 32"),
    ("canvas_length", "48", "multiple of block_length=32"),
    ("canvas_length", "0", "at least 1"),
    ("canvas_length", "2048", "context length of 2048"),
    ("confidence_threshold", "1.5", "0 to 1"),
    ("unmasking", "best", "threshold, paced_threshold, factor, quota"),
    ("factor", "-1", "0 to 256"),
    ("quota_schedule", "cosine", "even, timesteps"),
    ("cache_policy", "all", "none, prefix, dual, dkv-decode, dkv-prefill, dkv-greedy"),
    ("cache_policy", "dkv-greedy", "unmasking='threshold' cannot tell; allowed: random"),
    ("cache_refresh_interval", "-1", "from 0 to 256"),
    ("cache_window", "257", "from 0 to 256"),
    ("remask_below", "1.5", "0 to 1"),
    ("blok_length", "32", "block_length"),
]


@pytest.mark.parametrize(("option", "value", "allowed"), BAD)
def test_a_bad_value_is_refused_with_its_name_and_what_is_allowed(
    graph: Served, option: str, value: str, allowed: str
) -> None:
    for ask in WAYS:
        answer = ask(graph, {option: value})
        assert answer.startswith("error: "), f"{ask.__name__}: {answer}"
        assert option.replace("canvas_length", "canvas") in answer and allowed in answer, f"{ask.__name__}: {answer}"
