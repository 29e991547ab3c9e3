"""One question, one answer: whatever the client, the API, the worker and the company."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import requests

from benchmarks.demo_model import tasks
from tests.e2e.kserve import Kserve
from tests.e2e.reference import Answer, Reference
from tests.e2e.served import MODEL_NAME, Served, together

pytestmark = pytest.mark.e2e

LISTED = " ".join(tasks.WORDS[7 * i % len(tasks.WORDS)] for i in range(300))
PROMPTS = {
    "short": "spell lily",
    "numbers": "what is 31 plus 7?",
    "words": "write 147 in words",
    "several blocks": "count from 5 to 70",
    "copy": "repeat: 1 stone 2 river 3 moon",
    "long prompt": f"first 5 of: {LISTED}",
}
MAX_TOKENS = 96


def test_the_list_of_models_says_how_long_a_context_may_be(graph: Served) -> None:
    listed = requests.get(f"{graph.url}/v1/models", timeout=10).json()["data"]
    assert [(entry["id"], entry["context_window"]) for entry in listed] == [(MODEL_NAME, 2048)]


@pytest.mark.parametrize("name", PROMPTS)
def test_openai_chat(graph: Served, reference: Reference, name: str) -> None:
    prompt = PROMPTS[name]
    expected = reference.chat(prompt, MAX_TOKENS)
    messages: Any = [{"role": "user", "content": prompt}]

    reply = graph.openai.chat.completions.create(model=MODEL_NAME, messages=messages, max_tokens=MAX_TOKENS)
    chunks = list(
        graph.openai.chat.completions.create(
            model=MODEL_NAME,
            messages=messages,
            max_tokens=MAX_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    assert (reply.choices[0].message.content or "") == expected.text
    assert reply.choices[0].finish_reason == expected.finish_reason
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == _usage(expected)
    deltas = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in deltas) == expected.text
    assert [choice.finish_reason for choice in deltas if choice.finish_reason] == [expected.finish_reason]
    usage = chunks[-1].usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == _usage(expected)


@pytest.mark.parametrize("name", PROMPTS)
def test_openai_completions(graph: Served, reference: Reference, name: str) -> None:
    prompt = f"<|user|>{PROMPTS[name]}<|assistant|>"
    expected = reference.complete(prompt, MAX_TOKENS)

    reply = graph.openai.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=MAX_TOKENS)
    ids = reference.tokenizer.encode(prompt, add_special_tokens=False).ids
    from_ids = graph.openai.completions.create(model=MODEL_NAME, prompt=ids, max_tokens=MAX_TOKENS)
    chunks = list(graph.openai.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=MAX_TOKENS, stream=True))

    for whole in (reply, from_ids):
        assert whole.choices[0].text == expected.text
        assert whole.choices[0].finish_reason == expected.finish_reason
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == _usage(expected)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected.text


@pytest.mark.parametrize("name", PROMPTS)
def test_curl(graph: Served, reference: Reference, name: str) -> None:
    prompt = PROMPTS[name]
    expected = reference.chat(prompt, MAX_TOKENS)
    unary = graph.chat(prompt, MAX_TOKENS)
    with graph.stream(prompt, MAX_TOKENS) as stream:
        stream.read_all()
    assert (unary["text"], unary["finish_reason"]) == (expected.text, expected.finish_reason)
    assert (stream.text, stream.finish_reason) == (expected.text, expected.finish_reason)
    assert stream.is_complete and not stream.errors


@pytest.mark.parametrize("name", PROMPTS)
def test_kserve(graph: Served, reference: Reference, name: str) -> None:
    prompt = PROMPTS[name]
    expected = reference.chat(prompt, MAX_TOKENS)
    ids = reference.tokenizer.encode(f"<|user|>{prompt}<|assistant|>", add_special_tokens=False).ids
    with Kserve(graph.grpc) as kserve:
        streamed, num_responses = kserve.stream(prompt, max_tokens=MAX_TOKENS)
        unary = [kserve.infer(prompt, max_tokens=MAX_TOKENS), kserve.infer_ids(ids, max_tokens=MAX_TOKENS)]
    for answer in (*unary, streamed):
        assert (answer.text, answer.tokens) == (expected.text, expected.tokens)
        assert answer.finish_reason == expected.finish_reason
        assert answer.num_prompt_tokens == expected.num_prompt_tokens
    if len(expected.tokens) > 32:
        assert num_responses > 1


def test_an_answer_that_ends_by_itself_stops(graph: Served, reference: Reference) -> None:
    answer = graph.chat("spell lily", 64)
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(reference.chat("spell lily", 64).tokens) < 32


def test_no_max_tokens_means_the_default_canvas(graph: Served, reference: Reference) -> None:
    reply = graph.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "spell lily"}]})
    assert reply.json()["choices"][0]["message"]["content"] == reference.chat("spell lily", 128).text


def test_most_answers_are_right(graph: Served, reference: Reference) -> None:
    ask_tasks(graph, reference)


def ask_tasks(graph: Served, reference: Reference) -> None:
    """Fresh prompts of every task: the engine's own answers, and nine of ten of them right."""
    rng = random.Random("fresh prompts")
    kinds = list(tasks.TASKS.values())
    examples = [kinds[i % len(kinds)](rng, rng.uniform(0.1, 0.5)) for i in range(40)]
    answers = [
        reply.choices[0].message.content or ""
        for start in range(0, len(examples), 8)
        for reply in together(*(_asking_openai(graph, e.prompt) for e in examples[start : start + 8]))
    ]
    assert answers == [reference.chat(example.prompt, 128).text for example in examples]
    wrong = [
        f"{example.prompt!r}: {answer[:80]!r} instead of {example.answer!r}"
        for example, answer in zip(examples, answers, strict=True)
        if answer != example.answer
    ]
    assert len(wrong) <= len(examples) // 10, "\n".join(wrong)


def test_64_at_once_are_64_one_by_one(graph: Served, reference: Reference) -> None:
    rng = random.Random("64 at once")
    kinds = list(tasks.TASKS.values())
    prompts = [kinds[i % len(kinds)](rng, rng.uniform(0.05, 0.5)).prompt for i in range(64)]
    lengths = [rng.choice((20, 32, 64, 100)) for _ in prompts]
    expected = [reference.chat(*question) for question in zip(prompts, lengths, strict=True)]
    before = _prefilled(graph)

    answers = together(*(_asking(graph, *question) for question in zip(prompts, lengths, strict=True)))

    assert [answer["text"] for answer in answers] == [answer.text for answer in expected]
    assert [answer["finish_reason"] for answer in answers] == [answer.finish_reason for answer in expected]
    graph.wait_until_whole(num_workers=2)
    time.sleep(1.0)  # workers bring their totals up to date five times a second
    share = [after - was for after, was in zip(_prefilled(graph), before, strict=True)]
    assert min(share) > sum(share) / 4, f"tokens prefilled by each worker: {share}"


def _asking_openai(graph: Served, prompt: str) -> Any:
    messages: Any = [{"role": "user", "content": prompt}]
    return lambda: graph.openai.chat.completions.create(model=MODEL_NAME, messages=messages, max_tokens=128)


def _asking(graph: Served, prompt: str, max_tokens: int) -> Any:
    return lambda: graph.chat(prompt, max_tokens)


def _prefilled(graph: Served) -> list[float]:
    return [graph.metrics(worker)["sangam_worker_num_prefill_tokens_total"] for worker in graph.workers()]


def _usage(expected: Answer) -> tuple[int, int]:
    return expected.num_prompt_tokens, len(expected.tokens)
