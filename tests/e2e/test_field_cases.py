"""What users of other engines met, and cannot meet here: the cases that are about serving.

tests/backend/engine/test_field_cases.py has 2 to 6, 8, 10, 11 and 15 to 16. The others:

18  test_refusals.py, test_request_parser.py, test_scheduler.py (what never fits is refused)
19  test_scheduler.py (an error ends one request), test_engine.py (broken logits), test_request.py (transitions)
20  test_request.py (attempts), test_hybrid.py (late messages), test_dispatcher.py
21  test_placer.py, test_dispatcher.py (bounded retries), test_failures.py
22  test_failures.py and test_hybrid.py (clients that leave)
23  test_dispatcher.py, test_placer_life.py, test_failures.py (nothing is left; 100,000 requests have not been tried)
24  test_arrivals.py
25  test_client.py, test_metrics.py
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tritonclient.grpc as triton

from tests.e2e.kserve import Kserve
from tests.e2e.questions import Question
from tests.e2e.reference import Reference
from tests.e2e.served import SLOW, Served, together

pytestmark = pytest.mark.e2e

LONG = "count from 5 to 70"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OUTSIDE = 1_000_000
MASK, MASK_TEXT = 2, "<|mask|>"


@pytest.fixture
def graph(chaotic_graph: Served) -> Served:
    return chaotic_graph


@pytest.fixture(scope="module")
def reference(chaotic_reference: Reference) -> Reference:
    return chaotic_reference


@pytest.fixture
def bystander(graph: Served, reference: Reference) -> Iterator[None]:
    """Another request that streams during the test, and must not be disturbed."""
    expected = reference.chat(LONG, 96, ignore_eos=True, unmasking="quota", steps_per_block=32)
    with graph.stream(LONG, 96, ignore_eos=True, nvext=SLOW) as stream:
        yield
        stream.read_all()
    assert not stream.errors and stream.text == expected.text


def test_field_case_01_many_client_threads_get_what_one_gets(graph: Served, reference: Reference) -> None:
    """Prefills of all lengths, refreshes and denoising steps of all kinds, mixed on both workers."""
    rng = random.Random("48 at once")
    questions = []
    for i in range(48):
        prompt = " ".join(rng.choice(("moon", "river", "stone", "12", "147")) for _ in range(rng.randint(1, 300)))
        params = {"unmasking": "quota", "steps_per_block": rng.choice((2, 5, 8))} if i % 2 else {}
        questions.append(Question(prompt, rng.choice((1, 20, 32, 33, 64, 100)), params))
    expected = [question.expected(reference) for question in questions]
    assert together(*(question.by_http(graph) for question in questions)) == expected


@pytest.mark.parametrize("max_tokens", [1, 31, 32, 33, 100])
def test_field_case_07_max_tokens_is_obeyed_to_the_token(graph: Served, reference: Reference, max_tokens: int) -> None:
    expected = reference.chat(LONG, max_tokens, ignore_eos=True)
    assert (len(expected.tokens), expected.finish_reason) == (max_tokens, "length")
    unary = graph.chat(LONG, max_tokens, ignore_eos=True)
    with graph.stream(LONG, max_tokens, ignore_eos=True, stream_options={"include_usage": True}) as stream:
        stream.read_all()
    assert unary["usage"]["completion_tokens"] == max_tokens
    assert stream.usage is not None and stream.usage["completion_tokens"] == max_tokens
    assert unary["text"] == stream.text == expected.text
    assert unary["finish_reason"] == stream.finish_reason == "length"


def test_field_case_09_each_request_of_a_batch_draws_by_its_own_temperature_and_seed(
    graph: Served, reference: Reference
) -> None:
    """Numbers that 32-bit floats hold: Dynamo's OpenAI frontend passes on no others."""
    drawn = [
        {"temperature": temperature, "seed": seed, "top_p": top_p, "top_k": top_k}
        for temperature in (0.0, 0.5, 1.0, 2.0)
        for seed, top_p, top_k in ((1, 1.0, 0), (2, 1.0, 0), (2, 0.75, 20))
    ]
    questions = [Question("river", 40, {"ignore_eos": True, **params}) for params in drawn]
    expected = [question.expected(reference) for question in questions]
    over_http = together(*(question.by_http(graph) for question in questions))
    over_kserve = together(*(question.by_kserve(graph) for question in questions))
    assert over_http == over_kserve == expected
    assert len(set(expected[:3])) == 1 and len(set(expected)) == 10, "they differ, but for those of temperature 0"


def test_field_case_11_a_strategy_that_does_not_fit_is_refused(graph: Served, bystander: None) -> None:
    """At load: test_loader.py and test_dream.py in tests/backend/models."""
    fields = {"nvext": {"annotations": ["dllm.cache_policy:dkv-greedy"]}}
    reason = "unmasking='threshold' cannot tell; allowed: random"
    _refused_by_chat(graph, fields, reason)
    _refused_by_kserve(graph, lambda kserve: kserve.infer(LONG, cache_policy="dkv-greedy"), reason)


def test_field_case_12_a_mask_that_a_user_types_is_refused(
    graph: Served, reference: Reference, bystander: None
) -> None:
    reason = f"is the mask token ({MASK})"
    _refused_by_chat(graph, {"messages": [{"role": "user", "content": f"spell {MASK_TEXT} lily"}]}, reason)
    _refused_by_completions(graph, {"prompt": f"spell {MASK_TEXT}"}, reason)
    _refused_by_completions(graph, {"prompt": [20, MASK]}, reason)
    _refused_by_kserve(graph, lambda kserve: kserve.infer(f"spell {MASK_TEXT}"), reason)
    _refused_by_kserve(graph, lambda kserve: kserve.infer_ids([20, MASK]), reason)
    almost = Question(f"spell {MASK_TEXT[:-1]} lily", 32, {})
    assert almost.by_http(graph)() == almost.expected(reference)


def test_field_case_13_no_half_character_is_streamed(graph: Served, reference: Reference) -> None:
    """And in order. Stop strings across blocks: test_streams.py."""

    def characters(text: str) -> list[str]:
        return [c for c in text if not c.isascii() and c != "\ufffd"]

    params = {"ignore_eos": True, "unmasking": "quota", "steps_per_block": 4, "temperature": 2.0}
    for seed in range(200):
        whole = reference.chat(LONG, 96, seed=seed, **params)
        if wanted := characters(reference.tokenizer.decode(whole.tokens)):
            break
    else:
        pytest.fail("no answer has a character of several tokens")
    fields = {"ignore_eos": True, "temperature": 2.0, "seed": seed}
    annotations = ["dllm.unmasking:quota", "dllm.steps_per_block:4"]
    with graph.stream(LONG, 96, nvext={"annotations": annotations}, **fields) as stream:
        while stream.read():
            assert whole.text.startswith(stream.text)
    assert stream.text == whole.text and characters(stream.text) == wanted


def test_field_case_14_what_is_not_supported_is_refused_and_harms_nobody(graph: Served, bystander: None) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    _refused_by_chat(graph, {"response_format": schema}, "guided_decoding=")
    _refused_by_chat(graph, {"response_format": {"type": "json_object"}}, "guided_decoding=")
    _refused_by_chat(graph, {"prompt_logprobs": 1}, "prompt_logprobs")
    for field in ({"echo": True}, {"prompt_logprobs": 1}):
        _refused_by_completions(graph, {"prompt": LONG, **field}, "prompt_logprobs=1 is not supported; leave it out")
    for parameter in ("prompt_logprobs", "guided_decoding"):
        reason = f"{parameter}=1 is not supported; leave it out"
        _refused_by_kserve(graph, lambda kserve, parameter=parameter: kserve.infer(LONG, **{parameter: 1}), reason)  # type: ignore[misc]


@pytest.mark.parametrize("token", [OUTSIDE, -1])
def test_field_case_17_ids_outside_the_vocabulary_are_refused(graph: Served, bystander: None, token: int) -> None:
    if token >= 0:  # Dynamo's frontend refuses negative ones by itself
        _refused_by_completions(graph, {"prompt": [20, token]}, "outside the vocabulary")
        _refused_by_chat(graph, {"stop_token_ids": [token]}, "stop_token_ids holds 1000000, outside the vocabulary")
    _refused_by_kserve(graph, lambda kserve: kserve.infer_ids([20, token]), "outside the vocabulary")
    _refused_by_kserve(graph, lambda kserve: kserve.infer(LONG, stop_token_ids=str(token)), "outside the vocabulary")


def _messages() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": LONG}]}


def _refused_by_chat(graph: Served, fields: dict[str, Any], reason: str) -> None:
    reply = graph.post(CHAT, {**_messages(), "max_tokens": 32, **fields})
    assert reply.status_code == 400 and reason in reply.json()["message"], reply.text


def _refused_by_completions(graph: Served, fields: dict[str, Any], reason: str) -> None:
    """Dynamo's frontend says 500 and keeps the reason to itself."""
    before = graph.metrics("router").get('sangam_router_requests_total{outcome="refused"}', 0)
    reply = graph.post(COMPLETIONS, {"max_tokens": 32, **fields})
    assert reply.status_code == 500, reply.text
    assert graph.metrics("router")['sangam_router_requests_total{outcome="refused"}'] == before + 1
    assert reason in (graph.logs / "frontend.log").read_text().replace('\\"', '"')


def _refused_by_kserve(graph: Served, ask: Callable[[Kserve], Any], reason: str) -> None:
    with Kserve(graph.grpc) as kserve, pytest.raises(triton.InferenceServerException) as refusal:
        ask(kserve)
    assert reason in refusal.value.message()
