"""One line of a batch file -> a prompt and its options, under the rules that online requests have.

A line is an object with `prompt` (text or token ids) or `messages`, and options beside it; or one of OpenAI's
batch format, whose `body` is such an object. In a .txt file it is one user's message.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from backend.core.sampling_params import InvalidRequestError
from components.request_parser import (
    DLLM_OPTIONS,
    STANDARD_OPTIONS,
    UNSUPPORTED,
    boolean,
    dllm_options,
    parse_options,
    refuse_unsupported,
)
from components.text import TextProcessor

MAX_LINE_BYTES = 1 << 22
OPTIONS = (*STANDARD_OPTIONS, "stop", *DLLM_OPTIONS)
URLS = ("/v1/chat/completions", "/v1/completions")
_ENVELOPE = ("custom_id", "method", "url", "body")
_ALIASES = {"max_completion_tokens": "max_tokens"}
# They change nothing about the answer.
_IGNORED = ("model", "user", "metadata", "store", "service_tier", "stream", "stream_options")
# Online options that no answer here would show, with the values that ask for nothing.
_UNSERVED: dict[str, tuple[object, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "echo": (None, False),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "response_format": (None, {"type": "text"}),
}

Fields = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """What a line asks: token ids of the prompt, options as `build_request` takes them, stop strings."""

    prompt: Sequence[int]
    options: Mapping[str, Any]
    stop: Sequence[str]


def lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Number (from 0) and text of each line that is not blank; a longer one than MAX_LINE_BYTES is cut behind that."""
    index = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        rest = line
        while not rest.endswith(b"\n") and (rest := stream.readline(MAX_LINE_BYTES)):
            pass
        if line.strip():
            yield index, line
        index += 1


def arriving(stream: BinaryIO) -> Iterator[tuple[int, bytes] | None]:
    """`lines` of a pipe, with None whenever none is there yet: whoever writes it may wait for an answer first."""
    read: queue.Queue[tuple[int, bytes] | None] = queue.Queue(maxsize=64)

    def read_all() -> None:
        for line in lines(stream):
            read.put(line)
        read.put(None)

    threading.Thread(target=read_all, name="input", daemon=True).start()
    while True:
        try:
            line = read.get_nowait()
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        yield line


def read_fields(line: bytes) -> Fields:
    """A line's object.

    Raises:
        InvalidRequestError: it is none.
    """
    text = _text(line)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the line is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"the line is {_short(fields)}, not an object")
    return fields


def plain_fields(line: bytes, as_chat: bool) -> Fields:
    """What a line of plain text asks: it is a user's message, or as it stands the prompt.

    Raises:
        InvalidRequestError: it is no text.
    """
    text = _text(line)
    return {"messages": [{"role": "user", "content": text}]} if as_chat else {"prompt": text}


def _text(line: bytes) -> str:
    if len(line) > MAX_LINE_BYTES:
        raise InvalidRequestError(f"the line is too long; allowed: {MAX_LINE_BYTES} bytes")
    try:
        return line.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the line is not UTF-8: {error.reason} at byte {error.start}") from None


def custom_id(fields: Mapping[str, Any]) -> str | None:
    """Raises InvalidRequestError if it is no string."""
    value = fields.get("custom_id")
    if value is not None and not isinstance(value, str):
        raise InvalidRequestError(f"custom_id={_short(value)} is not a string")
    return value


def parse_line(fields: Mapping[str, Any], text: TextProcessor, defaults: Mapping[str, Any]) -> Line:
    """What a line asks; an option that it does not name has its default.

    Raises:
        InvalidRequestError: says which field is wrong and what is allowed.
    """
    asked = {**defaults, **_asked(fields)}
    return Line(_prompt(fields.get("body", fields), text), asked, _stop(asked.pop("stop", None)))


def _asked(fields: Mapping[str, Any]) -> Fields:
    """The options that a line names."""
    if "body" in fields:
        fields = _body(fields)
    asked = {key: value for key, value in fields.items() if key not in ("custom_id", "prompt", "messages")}
    extra = asked.pop("nvext", None)
    extra = {} if extra is None else extra
    if not isinstance(extra, dict) or not isinstance(extra.get("annotations") or [], list):
        raise InvalidRequestError(f"nvext={_short(extra)} is not an object with a list of annotations")
    annotations = extra.pop("annotations", None) or []
    if not all(isinstance(annotation, str) for annotation in annotations):
        raise InvalidRequestError(f"nvext.annotations={_short(annotations)} are not strings")
    asked |= extra
    for alias, name in _ALIASES.items():
        if (value := asked.pop(alias, None)) is not None and asked.get(name) is None:
            asked[name] = value
    refuse_unsupported(asked)
    for key in list(asked):
        if key in _UNSERVED and not _asks_nothing(asked[key], _UNSERVED[key]):
            raise InvalidRequestError(f"{key}={_short(asked[key])} is not supported offline; leave it out")
        if key in _UNSERVED or key in UNSUPPORTED or key in _IGNORED or asked[key] is None:
            del asked[key]
        elif key not in OPTIONS:
            raise InvalidRequestError(f"field {key!r} is not known; allowed: prompt, messages, {', '.join(OPTIONS)}")
        elif isinstance(asked[key], dict | list) and key not in ("stop", "stop_token_ids"):
            raise InvalidRequestError(f"{key}={_short(asked[key])} is not a single value")
    if "ignore_eos" in asked:
        boolean("ignore_eos", asked["ignore_eos"])
    if not isinstance(asked.get("stop_token_ids", []), list):
        raise InvalidRequestError(f"stop_token_ids={_short(asked['stop_token_ids'])} is not a list of token ids")
    return asked | parse_options(dllm_options(annotations, {}))


def _asks_nothing(value: object, nothings: tuple[object, ...]) -> bool:
    return any(type(value) is type(nothing) and value == nothing for nothing in nothings)  # 0 is not False


def _body(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a line of OpenAI's batch format asks."""
    for key in fields:
        if key not in _ENVELOPE:
            raise InvalidRequestError(f"field {key!r} beside body is not known; allowed: {', '.join(_ENVELOPE)}")
    if fields.get("method", "POST") != "POST":
        raise InvalidRequestError(f"method={_short(fields['method'])}; allowed: POST")
    if fields.get("url", URLS[0]) not in URLS:
        raise InvalidRequestError(f"url={_short(fields['url'])}; allowed: {', '.join(URLS)}")
    if not isinstance(fields["body"], dict):
        raise InvalidRequestError(f"body={_short(fields['body'])} is not an object")
    return fields["body"]


def _prompt(fields: Mapping[str, Any], text: TextProcessor) -> Sequence[int]:
    if ("prompt" in fields) == ("messages" in fields):
        raise InvalidRequestError("give exactly one of prompt (a string or token ids) and messages")
    if "messages" in fields:
        return text.encode_messages(_messages(fields["messages"]))
    prompt = fields["prompt"]
    if isinstance(prompt, str):
        _check_text("prompt", prompt)
        return text.encode(prompt)
    if not isinstance(prompt, list) or any(not isinstance(i, int) or isinstance(i, bool) for i in prompt):
        raise InvalidRequestError(f"prompt={_short(prompt)} is neither a string nor a list of token ids")
    return prompt


def _messages(messages: object) -> Sequence[Mapping[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError(f"messages={_short(messages)} is not a list of one or more messages")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidRequestError(f"messages[{number}]={_short(message)} is not an object")
        for field in ("role", "content"):
            _check_text(f"messages[{number}].{field}", message.get(field))
    return messages


def _check_text(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{field}={_short(value)} is not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{field} holds half a character at {error.start}: {error.reason}") from None


def _stop(value: object) -> Sequence[str]:
    strings = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(strings, list) or not all(isinstance(text, str) and text for text in strings):
        raise InvalidRequestError(f"stop={_short(value)} is neither a string nor a list of strings")
    return strings


def _short(value: object, length: int = 60) -> str:
    """A value for an error message."""
    shown = repr(value)
    return shown if len(shown) <= length else f"{shown[: length - 3]}..."
