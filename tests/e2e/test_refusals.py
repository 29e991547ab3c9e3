"""What is refused, how each API says so today, and that nobody else notices.

Dynamo 1.4 passes a router's 400 on from unary chat only: see the pinned codes. What its frontend
refuses by itself is a real 400 everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.e2e.reference import Reference
from tests.e2e.served import MODEL_NAME, SLOW, Served, together

pytestmark = pytest.mark.e2e

TOO_LONG = " ".join(["moon"] * 2020)
FAR_TOO_LONG = " ".join(["moon"] * 3000)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def bystander(graph: Served, reference: Reference) -> Iterator[None]:
    """Another request that streams during the test, and must not be disturbed."""
    prompt = "count from 5 to 70"
    expected = reference.chat(prompt, 96, ignore_eos=True, unmasking="quota", steps_per_block=32)
    with graph.stream(prompt, 96, ignore_eos=True, nvext=SLOW) as stream:
        yield
        stream.read_all()
    assert not stream.errors and stream.is_complete
    assert (stream.text, stream.finish_reason) == (expected.text, "length")


# What the router refuses: (fields of the body, part of the message).
BY_ROUTER: dict[str, tuple[dict[str, Any], str]] = {
    "over the context": ({"prompt": TOO_LONG, "max_tokens": 96}, "is over the context length of 2048 tokens"),
    "n": ({"n": 2}, "n=2 is not supported; leave it out or send 1"),
    "presence_penalty": ({"presence_penalty": 1.0}, "presence_penalty=1.0 is not supported"),
    "min_tokens": ({"min_tokens": 33}, "min_tokens=33 is out of range; allowed: a whole number from 0 to 32"),
}
COMPLETIONS_ONLY: dict[str, tuple[dict[str, Any], str]] = {
    "echo": ({"echo": True}, "prompt_logprobs=1 is not supported; leave it out (echo asks for it, too"),
    "best_of": ({"best_of": 2}, "best_of=2 is not supported"),
}


def _num_refused(graph: Served) -> float:
    return graph.metrics("router").get('sangam_router_requests_total{outcome="refused"}', 0)


@pytest.mark.parametrize("case", BY_ROUTER)
def test_chat(graph: Served, bystander: None, case: str) -> None:
    fields, message = BY_ROUTER[case]
    body = {"max_tokens": 32, **fields, "messages": user(fields.get("prompt", "spell lily"))}
    body.pop("prompt", None)
    before = _num_refused(graph)

    unary = graph.post("/v1/chat/completions", body)
    stream = graph.post("/v1/chat/completions", {**body, "stream": True})

    assert unary.status_code == 400 and message in unary.json()["message"]
    _refused_in_stream(stream)
    assert _num_refused(graph) - before == 2


@pytest.mark.parametrize("case", [*BY_ROUTER, *COMPLETIONS_ONLY])
def test_completions(graph: Served, bystander: None, case: str) -> None:
    fields, message = (BY_ROUTER | COMPLETIONS_ONLY)[case]
    body = {"prompt": "spell lily", "max_tokens": 32, **fields}
    before = _num_refused(graph)

    unary = graph.post("/v1/completions", body)
    stream = graph.post("/v1/completions", {**body, "stream": True})

    assert unary.status_code == 500, unary.text
    _refused_in_stream(stream)
    assert _num_refused(graph) - before == 2
    log = (graph.logs / "frontend.log").read_text()
    assert message in log.replace('\\"', '"'), "the reason is at least in the frontend's log"


def _refused_in_stream(reply: Any) -> None:
    """The status line is already sent when the router refuses: an error event has to do."""
    assert reply.status_code == 200
    assert '"error":{' in reply.text and '"content"' not in reply.text and '"text"' not in reply.text


# What Dynamo's frontend refuses before it sends a status line: (path, body, code).
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BY_FRONTEND: dict[str, tuple[str, dict[str, Any], int]] = {
    "empty prompt": (COMPLETIONS, {"prompt": ""}, 400),
    "empty list of prompts": (COMPLETIONS, {"prompt": []}, 400),
    "negative id": (COMPLETIONS, {"prompt": [-1]}, 400),
    "no messages": (CHAT, {"messages": []}, 400),
    "prompt over the context": (CHAT, {"messages": user(FAR_TOO_LONG)}, 400),
    "completions prompt over the context": (COMPLETIONS, {"prompt": FAR_TOO_LONG}, 400),
    "no tokens": (CHAT, {"messages": user("spell lily"), "max_tokens": 0}, 400),
    "temperature": (CHAT, {"messages": user("spell lily"), "temperature": 3}, 400),
    "unknown field": (CHAT, {"messages": user("spell lily"), "block_length": 32}, 400),
    "unknown model": (CHAT, {"messages": user("spell lily"), "model": "another"}, 404),
}


@pytest.mark.parametrize("case", BY_FRONTEND)
def test_the_frontend_itself(graph: Served, bystander: None, case: str) -> None:
    path, body, code = BY_FRONTEND[case]
    before = _num_refused(graph)
    for how in ({}, {"stream": True}):
        reply = graph.post(path, {**body, **how})
        assert reply.status_code == code, reply.text
        assert reply.json()["message"]
    assert _num_refused(graph) == before, "the router never saw it"


def _tensor(name: str, values: Any, kind: str) -> triton.InferInput:
    array = np.array(values, dtype=np.object_ if kind == "BYTES" else np.int64 if kind == "INT64" else np.int32)
    tensor = triton.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


TEXT = ("text_input", [b"spell lily"], "BYTES")
KSERVE: dict[str, tuple[list[tuple[str, Any, str]], dict[str, Any], str]] = {
    "no such input": ([("prompt", [b"spell lily"], "BYTES")], {}, "send exactly one of text_input"),
    "both inputs": ([TEXT, ("input_ids", [20], "INT64")], {}, "send exactly one of text_input"),
    "two texts": ([("text_input", [b"a", b"b"], "BYTES")], {}, "allowed: 1 of BYTES"),
    "empty text": ([("text_input", [b""], "BYTES")], {}, "text_input is empty"),
    "no UTF-8": ([("text_input", [b"\xff"], "BYTES")], {}, "text_input is not UTF-8"),
    "no ids": ([("input_ids", [], "INT64")], {}, "the prompt is empty"),
    "32-bit ids": ([("input_ids", [20], "INT32")], {}, "allowed: INT64"),
    "over the context": ([TEXT], {"max_tokens": 2048}, "is over the context length of 2048"),
    "no tokens": ([TEXT], {"max_tokens": 0}, "max_tokens=0 is out of range; allowed: a whole number of at least 1"),
    "half a token": ([TEXT], {"max_tokens": 2.5}, "max_tokens=2.5 is out of range"),
    "temperature": ([TEXT], {"temperature": 3.0}, "temperature=3.0 is out of range; allowed: 0 to 2"),
    "ignore_eos": ([TEXT], {"ignore_eos": "yes"}, "ignore_eos='yes' is not a boolean"),
    "stop": ([TEXT], {"stop": 7}, "stop=7 is not a string"),
    "top_p": ([TEXT], {"top_p": 1.5}, "top_p=1.5 is out of range; allowed: 0 to 1"),
    "top_k": ([TEXT], {"top_k": 2.5}, "top_k=2.5 is out of range; allowed: a whole number from 0"),
    "n": ([TEXT], {"n": 2}, "n=2 is not supported"),
    "logprobs": ([TEXT], {"logprobs": 21}, "logprobs=21 is out of range; allowed: a whole number from 0 to 20"),
    "logprobs of no number": ([TEXT], {"logprobs": True}, "logprobs=True is out of range"),
    "unknown parameter": ([TEXT], {"max_token": 3}, "parameter 'max_token' is not known; allowed: max_tokens"),
}


@pytest.mark.parametrize("case", KSERVE)
def test_kserve(graph: Served, bystander: None, case: str) -> None:
    inputs, parameters, message = KSERVE[case]
    with triton.InferenceServerClient(graph.grpc) as client:
        with pytest.raises(triton.InferenceServerException) as refusal:
            client.infer(MODEL_NAME, [_tensor(*tensor) for tensor in inputs], parameters=parameters)
    assert message in refusal.value.message()
    assert refusal.value.status() == "StatusCode.INTERNAL", "all that Dynamo's KServe frontend says"


def test_many_refusals_at_once_harm_no_one(graph: Served, bystander: None) -> None:
    body = {"messages": user("spell <|mask|>"), "max_tokens": 32}
    replies = together(*(lambda: graph.post(CHAT, body) for _ in range(24)))
    assert {reply.status_code for reply in replies} == {400}
