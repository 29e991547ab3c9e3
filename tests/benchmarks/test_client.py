from __future__ import annotations

import asyncio

import pytest

from benchmarks.client import Client, RequestFailed, first_model
from benchmarks.metrics import Outcome
from benchmarks.workload import Decoding, Question
from tests.benchmarks.fake_openai import FakeOpenAI


def ask(
    question: Question, server: FakeOpenAI | None = None, decoding: Decoding | None = None, timeout_s: float = 5.0
) -> Outcome:
    async def run() -> Outcome:
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with (server or FakeOpenAI()).running() as url:
            async with Client(url, "fake", decoding or Decoding(), timeout_s) as client:
                return await client.ask(3, question, 0.0, lambda: loop.time() - started)

    return asyncio.run(run())


def test_an_answer_is_timed_and_checked() -> None:
    outcome = ask(Question("pieces 3", 32, "count", answer="1 2 3"), FakeOpenAI(delay_s=0.05))
    assert (outcome.index, outcome.task, outcome.error, outcome.finish_reason) == (3, "count", "", "stop")
    assert (outcome.num_prompt_tokens, outcome.num_tokens, outcome.text) == (5, 3, "1 2 3 ")
    assert outcome.is_correct
    assert outcome.first_token_s is not None and outcome.sent_s + 0.04 < outcome.first_token_s < outcome.finished_s
    assert len(outcome.commit_gaps_s) == 2 and min(outcome.commit_gaps_s) > 0.02


def test_a_wrong_answer_is_no_error() -> None:
    outcome = ask(Question("pieces 3", 32, "count", answer="1 2 4"))
    assert outcome.error == "" and outcome.is_correct is False


def test_tokens_without_text_are_commits_too() -> None:
    outcome = ask(Question((301, 302), 32, "trace"))
    assert (outcome.error, outcome.text, outcome.num_tokens, len(outcome.commit_gaps_s)) == ("", "", 2, 1)
    assert outcome.is_correct is None


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("status 429", "HTTP 429"),
        ("status 500", "HTTP 500"),
        ("error", "error in the stream"),
        ("cut 2", "stream ended early"),
        ("garbage", "not JSON"),
        ("hang", "timeout"),
    ],
)
def test_what_goes_wrong_is_named(prompt: str, error: str) -> None:
    outcome = ask(Question(prompt, 32, "any", answer="1"), timeout_s=0.3)
    assert outcome.error == error
    assert outcome.is_correct is None
    assert outcome.finished_s >= outcome.sent_s


def test_a_server_that_is_not_there_is_an_error_as_well() -> None:
    async def run() -> tuple[Outcome, str]:
        async with FakeOpenAI().running() as url:
            model = await first_model(url)
        async with Client(url, model, Decoding()) as client:
            outcome = await client.ask(0, Question("pieces 1", 32, "any"), 0.0, lambda: 0.0)
        with pytest.raises(RequestFailed, match="does not list"):
            await first_model(url)
        return outcome, model

    outcome, model = asyncio.run(run())
    assert (outcome.error, model) == ("cannot connect", "fake")


def test_requests_say_how_to_denoise() -> None:
    server = FakeOpenAI()
    ask(Question((7, 8), 50, "trace"), server, Decoding(ignore_eos=True, canvas_length=64))
    body = server.bodies[0]
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"]) == ([7, 8], 50, True)
    assert body["nvext"] == {"annotations": ["dllm.canvas_length:64"]}
    assert body["stream_options"]["include_usage"]
