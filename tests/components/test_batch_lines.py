from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.request import Request
from backend.core.sampling_params import InvalidRequestError
from components.batch_lines import (
    MAX_LINE_BYTES,
    OPTIONS,
    Line,
    custom_id,
    lines,
    parse_line,
    plain_fields,
    read_fields,
)
from components.config import DEMO_MODELS
from components.protocol import ModelCard
from components.request_parser import Limits, build_request
from components.text import TextProcessor

TEXT = TextProcessor(DEMO_MODELS["demo"])
CARD = ModelCard("abc", vocab_size=696, mask_token_id=2, eos_token_ids=(1,), context_length=512)


def parse(line: bytes | dict[str, Any], **defaults: Any) -> Line:
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    return parse_line(read_fields(raw), TEXT, defaults)


def test_a_prompt_is_raw_text_and_messages_go_through_the_template() -> None:
    ids = TEXT.encode("<|user|>spell pear<|assistant|>")
    assert list(parse({"prompt": "spell pear"}).prompt) == TEXT.encode("spell pear")
    assert list(parse({"messages": [{"role": "user", "content": "spell pear"}]}).prompt) == ids
    assert list(parse({"prompt": [5, 6]}).prompt) == [5, 6]
    for as_chat, expected in ((True, ids), (False, TEXT.encode("spell pear"))):
        assert list(parse_line(plain_fields(b"spell pear\r\n", as_chat), TEXT, {}).prompt) == expected


def test_options_are_named_as_online_and_defaults_are_for_lines_that_name_none() -> None:
    line = {"prompt": "x", "max_tokens": 7, "stop": "end", "unmasking": "quota", "ignore_eos": True, "seed": None}
    parsed = parse(line, max_tokens=9, temperature=0.5, stop=["other"], seed=3)
    assert parsed.options == {
        "max_tokens": 7,
        "temperature": 0.5,
        "seed": 3,
        "unmasking": "quota",
        "ignore_eos": True,
    }
    assert parsed.stop == ["end"]
    assert parse({"prompt": "x"}, stop=["other"]).stop == ["other"]


def test_a_line_of_openais_batch_format() -> None:
    body = {
        "model": "gpt-4",
        "messages": [{"role": "user", "content": "spell pear"}],
        "max_completion_tokens": 20,
        "n": 1,
        "stop": ["a", "b"],
        "nvext": {"annotations": ["dllm.block_length:16", "somebody.else"], "ignore_eos": True},
    }
    line = {"custom_id": "q", "method": "POST", "url": "/v1/chat/completions", "body": body}
    parsed = parse(line, block_length=8)
    assert custom_id(line) == "q"
    assert parsed.options == {"max_tokens": 20, "block_length": 16, "ignore_eos": True}
    assert parsed.stop == ["a", "b"] and list(parsed.prompt) == TEXT.encode("<|user|>spell pear<|assistant|>")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "the line is not JSON: "),
        (b"[" * 100_000, "the line is not JSON: "),
        (b'"text"', "the line is 'text', not an object"),
        (b"\xff{}", "the line is not UTF-8: invalid start byte at byte 0"),
        ({}, "give exactly one of prompt"),
        ({"prompt": "x", "messages": []}, "give exactly one of prompt"),
        ({"prompt": 3}, "prompt=3 is neither a string nor a list of token ids"),
        ({"prompt": [1, "2"]}, r"prompt=\[1, '2'\] is neither"),
        ({"prompt": [True]}, r"prompt=\[True\] is neither"),
        ({"prompt": "\ud800"}, "prompt holds half a character at 0"),
        ({"messages": "hi"}, "messages='hi' is not a list"),
        ({"messages": []}, r"messages=\[\] is not a list of one or more"),
        ({"messages": ["hi"]}, r"messages\[0\]='hi' is not an object"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content=None is not a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            r"messages\[0\].content=\[.* is not a string",
        ),
        ({"prompt": "x", "max_token": 3}, "field 'max_token' is not known; allowed: prompt, messages, max_tokens, "),
        ({"text": "x", "prompt": "x"}, "field 'text' is not known"),
        ({"prompt": "x", "stop": [3]}, r"stop=\[3\] is neither a string nor a list of strings"),
        ({"prompt": "x", "stop": {"a": 1}}, "stop=.* is neither a string nor a list of strings"),
        ({"prompt": "x", "ignore_eos": 1}, "ignore_eos=1 is not a boolean; allowed: true, false"),
        ({"prompt": "x", "stop_token_ids": 7}, "stop_token_ids=7 is not a list of token ids"),
        ({"prompt": "x", "cache_policy": ["dual"]}, r"cache_policy=\['dual'\] is not a single value"),
        ({"prompt": "x", "n": 2}, "n=2 is not supported; leave it out or send 1"),
        ({"prompt": "x", "logprobs": 3}, "logprobs=3 is not supported offline"),
        ({"prompt": "x", "logprobs": 0}, "logprobs=0 is not supported offline"),
        ({"prompt": "x", "tools": [{}]}, "tools=.* is not supported offline"),
        ({"prompt": "x", "nvext": 3}, "nvext=3 is not an object"),
        ({"prompt": "x", "nvext": {"annotations": [1]}}, r"nvext.annotations=\[1\] are not strings"),
        ({"prompt": "x", "nvext": {"annotations": ["dllm.blok_length:1"]}}, "option 'blok_length' is not known"),
        ({"body": 3}, "body=3 is not an object"),
        ({"body": {}, "prompt": "x"}, "field 'prompt' beside body is not known"),
        ({"body": {"prompt": "x"}, "method": "GET"}, "method='GET'; allowed: POST"),
        ({"body": {"prompt": "x"}, "url": "/v1/embeddings"}, "url='/v1/embeddings'; allowed: /v1/chat/completions"),
    ],
)
def test_a_bad_line_is_refused_by_the_name_of_its_field(line: bytes | dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse(line)


@pytest.mark.parametrize("value", [3, ["a"], True])
def test_a_custom_id_is_a_string(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="custom_id=.* is not a string"):
        custom_id({"custom_id": value})


def test_options_that_ask_for_nothing_are_no_reason_to_refuse() -> None:
    line = {
        "prompt": "x",
        "logprobs": None,
        "top_logprobs": 0,
        "echo": False,
        "tools": [],
        "stream": True,
        "user": "me",
    }
    assert parse(line).options == {}
    assert parse(line | {"logprobs": False, "response_format": {"type": "text"}}).options == {}


def test_lines_are_numbered_as_in_the_file_and_blank_ones_left_out() -> None:
    found = list(lines(io.BytesIO(b"a\n\n  \nb\r\nc")))
    assert found == [(0, b"a\n"), (3, b"b\r\n"), (4, b"c")]
    assert list(lines(io.BytesIO(b""))) == list(lines(io.BytesIO(b"\n"))) == []
    assert list(parse(b'\xef\xbb\xbf{"prompt": [5]}').prompt) == [5]


def test_a_huge_line_is_refused_and_costs_no_more_memory_than_allowed() -> None:
    huge = b'{"prompt": "' + b"x" * (2 * MAX_LINE_BYTES) + b'"}\n'
    (first, cut), (second, line) = lines(io.BytesIO(huge + b'{"prompt": [5]}\n'))
    assert (first, second, len(cut)) == (0, 1, MAX_LINE_BYTES + 1)
    with pytest.raises(InvalidRequestError, match="too long; allowed: 4194304 bytes"):
        read_fields(cut)
    assert read_fields(line) == {"prompt": [5]}
    for end in (b"\n", b""):  # a line of just that length is one, and ends where it does
        just = b" " * (MAX_LINE_BYTES - len(b"{}" + end)) + b"{}" + end
        assert read_fields(next(lines(io.BytesIO(just)))[1]) == {}
    longest = b" " * (MAX_LINE_BYTES - 1) + b"x"
    assert [index for index, _ in lines(io.BytesIO(longest + b"\nnext\n"))] == [0, 1]


def request(fields: dict[str, Any]) -> Request:
    line = parse(fields)
    return build_request("r", line.prompt, line.options, CARD, Limits(512, 128), 0.0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
known = st.sampled_from(
    (*OPTIONS, "prompt", "messages", "nvext", "body", "n", "url", "logprobs", "max_completion_tokens")
)


@given(st.dictionaries(known, json_values, max_size=6))
def test_whatever_a_line_says_it_is_a_request_or_refused(fields: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequestError):
        assert request(fields).sequence_length <= 512
    with contextlib.suppress(InvalidRequestError):
        assert request({"prompt": [5], **fields}).sequence_length <= 512


def test_values_are_judged_by_the_rules_that_online_requests_have() -> None:
    line = parse({"prompt": "x", "nvext": {"annotations": ["dllm.block_length:x"]}})
    with pytest.raises(InvalidRequestError, match="block_length='x' is out of range; allowed: a whole number from 1"):
        build_request("r", line.prompt, line.options, CARD, Limits(512, 128), 0.0)


@pytest.mark.parametrize("field", ["temperature", "confidence_threshold", "max_tokens", "seed"])
@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_an_integer_too_large_for_a_float_is_refused(field: str, value: int) -> None:
    with pytest.raises(InvalidRequestError):
        request({"prompt": [5], field: value})


@pytest.mark.parametrize("value", [False, 0, {}])
def test_a_stop_string_is_a_string_though_it_says_nothing(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="stop=.* is neither a string nor a list of strings"):
        parse({"prompt": "x", "stop": value})
