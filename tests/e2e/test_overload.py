"""A small graph, over the tcp request plane: it answers, and it refuses what is too much for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.e2e.reference import Reference
from tests.e2e.served import MODEL_NAME, SLOW, Served, together, wait_until

pytestmark = pytest.mark.e2e

LONG = "count from 5 to 70"


def test_every_api_answers_over_tcp(small_graph: Served, reference: Reference) -> None:
    expected = reference.chat("spell lily", 32)
    assert small_graph.chat("spell lily", 32)["text"] == expected.text
    with small_graph.stream("spell lily", 32) as stream:
        stream.read_all()
    assert stream.text == expected.text
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"spell lily"], dtype=np.object_))
    with triton.InferenceServerClient(small_graph.grpc) as client:
        result = client.infer(MODEL_NAME, [tensor], parameters={"max_tokens": 32})
    assert result.as_numpy("text_output")[0].decode() == expected.text


def test_the_context_length_is_the_configured_one(small_graph: Served) -> None:
    messages = [{"role": "user", "content": "spell lily"}]
    reply = small_graph.post("/v1/chat/completions", {"messages": messages, "max_tokens": 512})
    assert reply.status_code == 400 and "context length of 512 tokens" in reply.json()["message"]
    messages = [{"role": "user", "content": " ".join(["moon"] * 600)}]
    reply = small_graph.post("/v1/chat/completions", {"messages": messages, "max_tokens": 32})
    assert reply.status_code == 400 and "512" in reply.json()["message"]


def test_overload_is_refused_before_the_headers_and_passes(small_graph: Served, reference: Reference) -> None:
    """Room for 600 tokens: two of these requests of 260 fit, whatever comes while they run does not."""
    expected = reference.chat(LONG, 250, ignore_eos=True, unmasking="quota", steps_per_block=32).text
    options: dict[str, Any] = {"ignore_eos": True, "nvext": SLOW}
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 250, **options}
    with small_graph.stream(LONG, 250, **options) as one, small_graph.stream(LONG, 250, **options) as two:
        one.read_text()
        two.read_text()

        unary = small_graph.post("/v1/chat/completions", body)
        assert unary.status_code == 429, unary.text

        streams = []
        for _ in range(20):  # the frontends hear of it within a moment
            streams.append(small_graph.post("/v1/chat/completions", {**body, "stream": True}))
            if streams[-1].status_code != 200:
                break
        assert streams[-1].status_code == 429, [(s.status_code, s.text[:200]) for s in streams]
        for early in streams[:-1]:
            assert '"error":{' in early.text

        for stream in (one, two):
            stream.read_all()
            assert stream.text == expected

    wait_until(lambda: small_graph.post("/v1/chat/completions", {**body, "max_tokens": 1}).ok, "recovery", 10.0)
    assert small_graph.chat("spell lily", 32)["text"] == reference.chat("spell lily", 32).text


def test_a_crowd_is_served_or_refused_and_never_queued_without_bound(small_graph: Served) -> None:
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 120, "ignore_eos": True, "nvext": SLOW}
    replies = together(*(lambda: small_graph.post("/v1/chat/completions", body) for _ in range(24)))
    codes = sorted(reply.status_code for reply in replies)
    assert set(codes) == {200, 429}, codes
    assert codes.count(200) >= 4
