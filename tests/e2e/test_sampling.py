"""How tokens are drawn and unmasked, and what is told of them, as clients ask for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.e2e.kserve import Kserve
from tests.e2e.reference import Answer, Reference
from tests.e2e.served import MODEL_NAME, Served

pytestmark = pytest.mark.e2e

PROMPT = "count from 7 to 40"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
# Dynamo's frontend passes numbers on as float32.
TOP_P = float(np.float32(0.9))
DRAWN: dict[str, Any] = {"temperature": 1.5, "top_p": TOP_P, "top_k": 20}


def test_draws_keep_to_the_seed_and_to_what_is_left_to_draw_from(
    chaotic_graph: Served, chaotic_reference: Reference
) -> None:
    answers: dict[int, str | None] = {}
    for seed in (1, 1, 2, 3):
        reply = chaotic_graph.openai.chat.completions.create(
            model=MODEL_NAME, messages=MESSAGES, max_tokens=64, temperature=1.5, top_p=0.9, seed=seed,
            extra_body={"top_k": 20, "ignore_eos": True},
        )  # fmt: skip
        text = reply.choices[0].message.content
        assert text == chaotic_reference.chat(PROMPT, 64, ignore_eos=True, seed=seed, **DRAWN).text
        assert answers.setdefault(seed, text) == text
    assert len(set(answers.values())) == 3


def test_a_top_p_of_next_to_nothing_is_the_most_likely_answer(
    chaotic_graph: Served, chaotic_reference: Reference
) -> None:
    reply = chaotic_graph.openai.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, max_tokens=64, temperature=1.0, top_p=1e-6
    )
    assert reply.choices[0].message.content == chaotic_reference.chat(PROMPT, 64).text


def _agree(content: Any, expected: Answer, reference: Reference, num_top: int) -> None:
    """The logprobs of a chat against the engine's own."""
    assert len(content) == len(expected.tokens)
    for said, token, of in zip(content, expected.tokens, expected.logprobs, strict=True):
        assert said.logprob == pytest.approx(of.logprob, abs=1e-4)
        assert [top.logprob for top in said.top_logprobs] == pytest.approx([lp for _, lp in of.top], abs=1e-4)
        assert len(said.top_logprobs) == num_top
        text = reference.tokenizer.decode([token])
        assert said.token.strip() == text.strip()


def test_logprobs_of_a_chat_unary_and_streaming(graph: Served, reference: Reference) -> None:
    expected = reference.chat(PROMPT, 48, logprobs=3)
    ask: dict[str, Any] = {"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": 48}
    reply = graph.openai.chat.completions.create(**ask, logprobs=True, top_logprobs=3)
    choice = reply.choices[0]
    assert choice.message.content == expected.text
    assert choice.logprobs is not None and choice.logprobs.content is not None
    _agree(choice.logprobs.content, expected, reference, 3)
    for said in choice.logprobs.content:
        assert said.top_logprobs[0].logprob == said.logprob <= 0, "temperature 0: the most likely one"

    streamed: list[Any] = []
    for chunk in graph.openai.chat.completions.create(**ask, logprobs=True, top_logprobs=3, stream=True):
        for part in chunk.choices:
            if part.logprobs is not None:
                streamed += part.logprobs.content or []
    assert [said.logprob for said in streamed] == [said.logprob for said in choice.logprobs.content]


def test_no_logprobs_unless_they_are_asked_for(graph: Served) -> None:
    reply = graph.openai.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=16)
    assert reply.choices[0].logprobs is None


def test_logprobs_of_a_completion(graph: Served, reference: Reference) -> None:
    expected = reference.complete(PROMPT, 32, logprobs=2, ignore_eos=True)
    reply = graph.openai.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=32, logprobs=2, extra_body={"ignore_eos": True}
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert logprobs.token_logprobs == pytest.approx([of.logprob for of in expected.logprobs], abs=1e-4)


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs_over_kserve_are_those_of_the_openai_api(graph: Served, reference: Reference, num_top: int) -> None:
    expected = reference.chat(PROMPT, 80, logprobs=num_top)
    reply = graph.openai.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, max_tokens=80, logprobs=True, top_logprobs=num_top
    )
    assert reply.choices[0].logprobs is not None
    said = reply.choices[0].logprobs.content or []
    with Kserve(graph.grpc) as kserve:
        streamed, num_responses = kserve.stream(PROMPT, max_tokens=80, logprobs=num_top)
        unary = kserve.infer(PROMPT, max_tokens=80, logprobs=num_top)
        assert kserve.infer(PROMPT, max_tokens=80).logprobs == ()
    assert num_responses > 1
    for answer in (unary, streamed):
        assert answer.tokens == expected.tokens
        assert [of.logprob for of in answer.logprobs] == pytest.approx([of.logprob for of in said], abs=1e-5)
        for of, other, known in zip(answer.logprobs, said, expected.logprobs, strict=True):
            assert [token for token, _ in of.top] == [token for token, _ in known.top]
            # With none asked for, Dynamo's frontend lists the token itself.
            tops = [top.logprob for top in other.top_logprobs][:num_top]
            assert [lp for _, lp in of.top] == pytest.approx(tops, abs=1e-5)


def test_min_tokens_and_stop_tokens(graph: Served, reference: Reference) -> None:
    short = reference.chat("spell lily", 64)
    assert short.finish_reason == "stop" and len(short.tokens) < 30
    reply = graph.openai.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": "spell lily"}], max_tokens=64,
        extra_body={"min_tokens": 30},
    )  # fmt: skip
    assert reply.usage is not None and reply.usage.completion_tokens >= 30
    assert reply.choices[0].message.content == reference.chat("spell lily", 64, min_tokens=30).text

    third = reference.chat(PROMPT, 64).tokens[2]
    reply = graph.openai.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, max_tokens=64, extra_body={"stop_token_ids": [third]}
    )
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None and reply.usage.completion_tokens <= 2


def test_ignore_eos_leaves_nothing_but_max_tokens(graph: Served, reference: Reference) -> None:
    """But a stop string over KServe: Dynamo's OpenAI frontend drops it."""
    expected = reference.chat("spell lily", 40, ignore_eos=True)
    second = expected.tokens[1]
    text = reference.tokenizer.decode([second])
    answer = graph.chat("spell lily", 40, ignore_eos=True, stop_token_ids=[second], stop=[text])
    assert (answer["text"], answer["finish_reason"]) == (expected.text, "length")
    assert answer["usage"]["completion_tokens"] == 40
    with Kserve(graph.grpc) as kserve:
        options = {"max_tokens": 40, "ignore_eos": True}
        whole = kserve.infer("spell lily", stop_token_ids=str(second), **options)
        assert (whole.tokens, whole.finish_reason) == (expected.tokens, "length")
        cut = kserve.infer("spell lily", stop=text, **options)
        assert (cut.tokens, cut.finish_reason) == (expected.tokens[:2], "stop")


def test_logprobs_of_blocks_that_were_handed_over(disaggregated_graph: Served, chaotic_reference: Reference) -> None:
    """Three blocks, each prefilled on one worker and denoised on another."""
    expected = chaotic_reference.chat(PROMPT, 80, logprobs=2, confidence_threshold=0.5)
    reply = disaggregated_graph.openai.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, max_tokens=80, logprobs=True, top_logprobs=2,
        extra_body={"nvext": {"annotations": ["dllm.confidence_threshold:0.5"]}},
    )  # fmt: skip
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    _agree(logprobs.content, expected, chaotic_reference, 2)


def test_logprobs_over_kserve_of_blocks_that_were_handed_over(
    disaggregated_graph: Served, chaotic_reference: Reference
) -> None:
    expected = chaotic_reference.chat(PROMPT, 80, logprobs=2, confidence_threshold=0.5)
    with Kserve(disaggregated_graph.grpc) as kserve:
        answer = kserve.infer(PROMPT, max_tokens=80, logprobs=2, confidence_threshold=0.5)
    assert answer.tokens == expected.tokens
    assert [of.logprob for of in answer.logprobs] == pytest.approx([of.logprob for of in expected.logprobs], abs=1e-4)
    assert [[token for token, _ in of.top] for of in answer.logprobs] == [
        [token for token, _ in of.top] for of in expected.logprobs
    ]
