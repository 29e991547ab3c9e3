from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.logprobs import TokenLogprobs
from backend.core.request import Request, RequestStatus
from backend.core.sampling_params import InvalidRequestError, SamplingParams
from components.protocol import (
    BlockNews,
    HeldKV,
    LoadReport,
    ModelCard,
    block_dispatch,
    pack_tokens,
    read_dispatch,
    unpack_tokens,
)

CARD = ModelCard("abc", 696, 2, (1, 3), 2048)
REPORT = LoadReport(7, "prefill_worker", CARD, False, 16, 256, 200, 1, 2, 333)
HELD = HeldKV(9, "r/1.3", [4, 2, 7], 5, [(0, 11), (3, 12)])
LOGPROBS = (TokenLogprobs(-0.1, ((4, -0.1), (9, -2.5))), TokenLogprobs(-9999.0, ((1, -0.5), (5, -0.75))))
PARAMS = SamplingParams(
    50, 64, unmasking="quota", steps_per_block=4, temperature=0.5, top_p=0.9, seed=-3, stop_token_ids=(1, 9), logprobs=2
)


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
    read, held = read_dispatch(message)
    assert held is None and read.status is RequestStatus.WAITING
    assert (read.prompt, read.response, read.params) == (request.prompt, request.response, request.params)
    assert (read.block.index, read.block.attempt, read.block.known) == (1, 3, (7, 8))
    assert read.arrival_time == 12.5


def test_a_prefilled_block_comes_with_its_commits_and_where_its_kv_lies() -> None:
    request, _ = dispatched()
    read, held = read_dispatch(block_dispatch(request, HELD))
    assert held == HELD and read.status is RequestStatus.WAITING_FOR_KV
    # What an earlier attempt streamed stands: known is [7, 8].
    assert read.block.tokens[:4] == [7, None, None, 12] and read.block.step == 1
    assert read.block.num_masked == 30


def test_logprobs_of_what_the_prefill_committed_go_with_it() -> None:
    request, _ = dispatched()
    read, _ = read_dispatch(block_dispatch(request, replace(HELD, logprobs=LOGPROBS)))
    assert read.block.logprobs == {0: LOGPROBS[0], 3: LOGPROBS[1]}
    running, _ = read_dispatch(block_dispatch(request, HeldKV(9, "r/1.3", [4], 5, (), is_running=True)))
    assert running.block.logprobs == {} and running.block.step == 0


def test_a_dispatch_has_a_name_of_its_own() -> None:
    """The same request's next block, or the next attempt at this one, is another one to the worker."""
    request, message = dispatched()
    again = Request("r", [5], PARAMS, 12.5, finished_blocks=range(100, 132), attempt=4)
    first = Request("r", [5], PARAMS, 12.5)
    names = {message["request_id"], block_dispatch(again)["request_id"], block_dispatch(first)["request_id"]}
    assert len(names) == 3


@pytest.mark.parametrize("field", ["params", "prompt", "known", "attempt", "held"])
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
        BlockNews([4, 5, 6]),
        BlockNews([4, 5], logprobs=LOGPROBS),
        BlockNews([4, 5], logprobs=(TokenLogprobs(-0.25), TokenLogprobs(-1.5))),
        BlockNews([4], held=replace(HELD, logprobs=LOGPROBS), logprobs=LOGPROBS[:1], num_steps=1),
        BlockNews([], True, seconds=(0.5, 0.25, 0.0, 0.0, 2.0), num_steps=9),
        BlockNews([4], held=HELD, seconds=(0.5, 0.25, 0.0, 0.0, 0.0), num_steps=1),
        BlockNews([], True, error="broken"),
        BlockNews([], True, error="KV transfer", is_retryable=True),
        BlockNews([], True, error="too long", is_refusal=True),
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
