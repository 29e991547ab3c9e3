"""What is streamed, and where answers stop."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.reference import BLOCK, Answer, Reference
from tests.e2e.served import SLOW, Served, together

pytestmark = pytest.mark.e2e

LONG = "count from 5 to 70"
SLOWLY: dict[str, Any] = {"unmasking": "quota", "steps_per_block": 32}


@pytest.fixture
def graph(chaotic_graph: Served) -> Served:
    return chaotic_graph


@pytest.fixture(scope="module")
def reference(chaotic_reference: Reference) -> Reference:
    return chaotic_reference


def test_a_stream_only_appends_and_is_the_unary_answer(graph: Served, reference: Reference) -> None:
    expected = reference.chat(LONG, 96, **SLOWLY)
    with graph.stream(LONG, 96, nvext=SLOW, stream_options={"include_usage": True}) as stream:
        while stream.read():
            assert expected.text.startswith(stream.text)
    assert stream.text == expected.text == graph.chat(LONG, 96, nvext=SLOW)["text"]
    assert len(stream.chunks) > len(expected.tokens) // BLOCK
    assert stream.finish_reason == expected.finish_reason
    assert stream.usage is not None
    assert stream.usage["prompt_tokens"] == expected.num_prompt_tokens
    assert stream.usage["completion_tokens"] == len(expected.tokens)


def test_usage_is_streamed_only_when_asked_for(graph: Served) -> None:
    with graph.stream("spell lily", 32) as stream:
        stream.read_all()
    assert stream.is_complete and stream.usage is None


def _stops(reference: Reference, answer: Answer) -> dict[str, list[str]]:
    def text(start: int, end: int) -> str:
        return reference.tokenizer.decode(answer.tokens[start:end])

    return {
        "one token": [text(4, 5)],
        "over two tokens": [text(4, 6)],
        "within two tokens": [text(4, 6)[1:-1]],
        "over a block boundary": [text(BLOCK - 1, BLOCK + 1)],
        "over a block boundary, in three": [text(BLOCK - 2, BLOCK + 2)],
        "several, the later one first": [text(20, 22), text(6, 8)],
        "none that occurs": ["no such text", text(4, 5) + "x"],
        "a beginning at the very end": [text(len(answer.tokens) - 2, len(answer.tokens)) + "!"],
    }


@pytest.mark.parametrize(
    "kind",
    [
        "one token",
        "over two tokens",
        "within two tokens",
        "over a block boundary",
        "over a block boundary, in three",
        "several, the later one first",
        "none that occurs",
        "a beginning at the very end",
    ],
)
def test_stop_strings(graph: Served, reference: Reference, kind: str) -> None:
    whole = reference.chat(LONG, 96, **SLOWLY)
    assert len(whole.tokens) > BLOCK + 4, "the answer is too short for this test"
    stop = _stops(reference, whole)[kind]
    found = [at for text in stop if (at := whole.text.find(text)) >= 0]
    expected = whole.text[: min(found)] if found else whole.text
    if found:
        assert expected != whole.text
        num_tokens = next(
            n
            for n in range(1, len(whole.tokens) + 1)
            if any(text in reference.tokenizer.decode(whole.tokens[:n]) for text in stop)
        )
    else:
        num_tokens = len(whole.tokens)

    unary = graph.chat(LONG, 96, stop=stop, nvext=SLOW)
    with graph.stream(LONG, 96, stop=stop, nvext=SLOW, stream_options={"include_usage": True}) as stream:
        while stream.read():
            assert expected.startswith(stream.text), f"leaked: {stream.text!r}"

    assert unary["text"] == stream.text == expected
    assert unary["finish_reason"] == stream.finish_reason == ("stop" if found else whole.finish_reason)
    assert stream.usage is not None
    assert unary["usage"]["completion_tokens"] == stream.usage["completion_tokens"] == num_tokens


def test_temperature_0_needs_no_seed(graph: Served, reference: Reference) -> None:
    answers = together(*(lambda: graph.chat("sort 45 12 78", 32, temperature=0) for _ in range(4)))
    assert {answer["text"] for answer in answers} == {reference.chat("sort 45 12 78", 32).text}
