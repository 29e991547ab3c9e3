from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.request import Request
from backend.core.sampling_params import InvalidRequestError, SamplingParams
from components.protocol import (
    BlockNews,
    LoadReport,
    ModelCard,
    block_dispatch,
    pack_tokens,
    read_dispatch,
    unpack_tokens,
)

CARD = ModelCard("abc", 696, 2, (1, 3), 2048)
REPORT = LoadReport(7, CARD, 4096, 200, 256, 1, 2, 333)
PARAMS = SamplingParams(50, 64, unmasking="quota", steps_per_block=4, temperature=0.5, seed=-3, stop_token_ids=(1, 9))


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_tokens_survive_packing(tokens: list[int]) -> None:
    data = pack_tokens(tokens)
    assert len(data) == 4 * len(tokens)
    assert unpack_tokens(data) == tokens


def test_tokens_travel_little_endian() -> None:
    assert pack_tokens([1, 256]) == b"\x01\0\0\0\0\x01\0\0"


def dispatched() -> tuple[Request, dict[str, Any]]:
    request = Request("r", [5, 2, 5], PARAMS, 12.5, finished_blocks=range(100, 132), known=[7, 8], attempt=3)
    return request, block_dispatch(request)


def test_a_dispatch_is_read_as_the_request_that_it_was() -> None:
    request, message = dispatched()
    read = read_dispatch(message)
    assert (read.prompt, read.response, read.params) == (request.prompt, request.response, request.params)
    assert (read.block.index, read.block.attempt, read.block.known) == (1, 3, (7, 8))
    assert read.arrival_time == 12.5


def test_a_dispatch_has_a_name_of_its_own() -> None:
    """The same request's next block, or the next attempt at this one, is another one to the worker."""
    request, message = dispatched()
    again = Request("r", [5], PARAMS, 12.5, finished_blocks=range(100, 132), attempt=4)
    first = Request("r", [5], PARAMS, 12.5)
    names = {message["request_id"], block_dispatch(again)["request_id"], block_dispatch(first)["request_id"]}
    assert len(names) == 3


@pytest.mark.parametrize("field", ["params", "prompt", "known", "attempt"])
def test_a_dispatch_without_a_field_is_none(field: str) -> None:
    _, message = dispatched()
    del message[field]
    with pytest.raises(KeyError):
        read_dispatch(message)


def test_a_dispatch_is_validated_again() -> None:
    _, message = dispatched()
    message["params"]["max_tokens"] = 0
    with pytest.raises(InvalidRequestError):
        read_dispatch(message)


@pytest.mark.parametrize(
    "news",
    [
        BlockNews([4, 5, 6], seconds=[0.0, 0.0, 0.0]),
        BlockNews([], True, seconds=[0.5, 0.25, 2.0], num_steps=9),
        BlockNews([], True, "broken", seconds=[0.0, 0.0, 0.0]),
        BlockNews([], True, "too long", is_refusal=True, seconds=[0.0, 0.0, 0.0]),
    ],
)
def test_news_survive_the_wire(news: BlockNews) -> None:
    assert BlockNews.from_wire(news.to_wire()) == news


def test_a_load_report_survives_the_wire() -> None:
    assert LoadReport.from_wire(json.loads(json.dumps(asdict(REPORT)))) == REPORT


def test_a_load_report_of_a_newer_version_is_understood() -> None:
    message = json.loads(json.dumps(asdict(REPORT)))
    message["num_transfers"] = 3
    message["model"]["quantization"] = "fp8"
    assert LoadReport.from_wire(message) == REPORT


@pytest.mark.parametrize("message", [{}, {"worker_id": 1}, [], None, "load"])
def test_what_is_no_load_report_is_refused(message: Any) -> None:
    with pytest.raises((KeyError, TypeError)):
        LoadReport.from_wire(message)
