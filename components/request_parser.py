"""From what Dynamo's frontends hand over to a validated `Request`; every refusal names its field."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.core.request import Request
from backend.core.sampling_params import InvalidRequestError, SamplingParams
from components.config import RouterConfig
from components.protocol import ModelCard

ANNOTATION_PREFIX = "dllm."

_INTEGERS = ("block_length", "canvas_length", "steps_per_block", "cache_refresh_interval", "cache_window")
_NUMBERS = ("confidence_threshold", "factor", "remask_below")
_STRINGS = ("unmasking", "quota_schedule", "cache_policy")
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Standard options of the draw, named alike in every API."""
STANDARD_OPTIONS = ("max_tokens", "min_tokens", *SAMPLING_FIELDS, "ignore_eos", "stop_token_ids")
DLLM_OPTIONS = (*_INTEGERS, *_NUMBERS, *_STRINGS)

# Standard options that are not served yet, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "length_penalty": (None, 1, 1.0),
    "guided_decoding": (None, {}),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
}
# Dynamo's frontend turns `echo` into `prompt_logprobs`.
_REASONS = {"prompt_logprobs": " (echo asks for it, too: the tokens of a prompt are never predicted)"}


@dataclass(frozen=True)
class Limits:
    """What a router accepts.

    Attributes:
        context_length: prompt + canvas, at most, in tokens.
        default_canvas_length: canvas of a request that names neither canvas_length nor max_tokens.
    """

    context_length: int
    default_canvas_length: int

    @classmethod
    def of(cls, config: RouterConfig, card: ModelCard) -> Limits:
        length = min(card.context_length, config.context_length or card.context_length)
        return cls(length, config.default_canvas_length)


def dllm_options(annotations: Sequence[str], metadata: Mapping[str, str]) -> dict[str, str]:
    """The dLLM options of `nvext.annotations` ("dllm.block_length:32") and `x-dynamo-meta-*` headers.

    An annotation wins over a header. Annotations without the prefix are somebody else's.

    Raises:
        InvalidRequestError: an option that does not exist, or one without a value.
    """
    options = {key.replace("-", "_").lower(): value for key, value in metadata.items()}
    for annotation in annotations:
        if annotation.startswith(ANNOTATION_PREFIX):
            key, colon, value = annotation.removeprefix(ANNOTATION_PREFIX).partition(":")
            if not colon:
                raise InvalidRequestError(f"annotation {annotation!r} has no value; write dllm.{key}:VALUE")
            options[key.strip(" ")] = value.strip(" ")
    for key in options:
        if key not in DLLM_OPTIONS:
            raise InvalidRequestError(f"option {key!r} is not known; allowed: {', '.join(DLLM_OPTIONS)}")
    return options


def parse_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Text values of dLLM options to numbers; what is none stays text, for `SamplingParams` to refuse."""
    return {key: _number(key, text) for key, text in options.items()}


def _number(key: str, text: str) -> int | float | str:
    if not text.isascii() or "_" in text:
        return text  # Python reads more digits and more spellings as numbers than an API should
    try:
        return int(text) if key in _INTEGERS else float(text) if key in _NUMBERS else text
    except ValueError:
        return text


def build_request(
    request_id: str,
    prompt: Sequence[int],
    options: Mapping[str, Any],
    card: ModelCard,
    limits: Limits,
    arrival_time: float,
    revises: bool = False,
) -> Request:
    """A validated request.

    Args:
        revises: see `Request`.
        options: fields of `SamplingParams`; absent or None means the default. `ignore_eos` and
            `eos_token_ids` are understood too.

    Raises:
        InvalidRequestError: says which field is wrong and what is allowed.
    """
    given = {key: value for key, value in options.items() if value is not None}
    ignore_eos = bool(given.pop("ignore_eos", False))
    asked_ids = _stop_ids(given.pop("stop_token_ids", ()), card)
    eos_ids = [token for token in given.pop("eos_token_ids", ()) if 0 <= token < card.vocab_size]
    stop_ids = () if ignore_eos else (*card.eos_token_ids, *asked_ids, *eos_ids)
    given = {**_defaults(card, given), **given}
    block_length = given.setdefault("block_length", SamplingParams.block_length)
    given.setdefault("steps_per_block", block_length)
    given.setdefault("seed", secrets.randbits(62))
    if given.get("top_k") == -1:  # all tokens, as vLLM's clients say it
        given["top_k"] = 0
    max_tokens = given.get("max_tokens")
    if "canvas_length" not in given:
        wanted = limits.default_canvas_length if max_tokens is None else max_tokens
        if isinstance(wanted, int) and isinstance(block_length, int) and block_length > 0:
            given["canvas_length"] = max(-(-wanted // block_length), 1) * block_length
        else:  # one of them is refused below, by its own name
            given["canvas_length"] = block_length
    if max_tokens is None:
        given["max_tokens"] = given["canvas_length"]
    params = SamplingParams(**given, stop_token_ids=tuple(dict.fromkeys(stop_ids)))
    if params.min_tokens and len({*params.stop_token_ids, card.mask_token_id}) == card.vocab_size:
        raise InvalidRequestError("stop_token_ids names the whole vocabulary: nothing is left for the first min_tokens")
    _check_prompt(prompt, card)
    request = Request(request_id, prompt, params, arrival_time, revises=revises)
    if request.sequence_length > limits.context_length:
        raise InvalidRequestError(
            f"prompt ({len(prompt)} tokens) + canvas ({params.canvas_length} tokens) = {request.sequence_length} "
            f"is over the context length of {limits.context_length} tokens; shorten the prompt or lower max_tokens"
        )
    return request


def _defaults(card: ModelCard, given: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's, less those that were meant for another length than the request asks for."""
    defaults = dict(card.defaults)
    if "block_length" in given:
        defaults.pop("steps_per_block", None)
    if "block_length" in given or "max_tokens" in given:
        defaults.pop("canvas_length", None)
    return defaults


def _stop_ids(tokens: Any, card: ModelCard) -> Sequence[int]:
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < card.vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids holds {token!r}, outside the vocabulary; allowed: 0 to {card.vocab_size - 1}"
            )
    return list(tokens)


def _check_prompt(prompt: Sequence[int], card: ModelCard) -> None:
    if not prompt:
        raise InvalidRequestError("the prompt is empty; at least 1 token is needed")
    for position, token in enumerate(prompt):
        if not 0 <= token < card.vocab_size:
            raise InvalidRequestError(
                f"prompt token {position} is {token}, outside the vocabulary; allowed: 0 to {card.vocab_size - 1}"
            )
        if token == card.mask_token_id:
            raise InvalidRequestError(
                f"prompt token {position} is the mask token ({token}), which only the canvas may hold"
            )


def parse_tokens_request(
    message: Mapping[str, Any],
    metadata: Mapping[str, str],
    request_id: str,
    card: ModelCard,
    limits: Limits,
    arrival_time: float,
) -> Request:
    """A request of Dynamo's OpenAI frontend (its preprocessed "backend" form) as a `Request`.

    Raises:
        InvalidRequestError: says which field is wrong and what is allowed.
    """
    stop = message.get("stop_conditions") or {}
    sampling = message.get("sampling_options") or {}
    output = message.get("output_options") or {}
    refuse_unsupported({**sampling, **stop, **output})
    options = parse_options(dllm_options(message.get("annotations") or (), metadata))
    options |= {
        "max_tokens": stop.get("max_tokens"),
        "ignore_eos": stop.get("ignore_eos"),
        "min_tokens": stop.get("min_tokens"),
        "stop_token_ids": stop.get("stop_token_ids"),
        "eos_token_ids": (*(stop.get("stop_token_ids_hidden") or ()), *(message.get("eos_token_ids") or ())),
        "logprobs": output.get("logprobs"),
        **{field: sampling.get(field) for field in SAMPLING_FIELDS},
    }
    return build_request(request_id, message.get("token_ids") or (), options, card, limits, arrival_time)


def boolean(field: str, value: object) -> bool:
    """Raises InvalidRequestError for anything but true and false."""
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{field}={value!r} is not a boolean; allowed: true, false")
    return value


def refuse_unsupported(options: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError for the first option that asks for something not served."""
    for field, nothing in UNSUPPORTED.items():
        if field in options and options[field] not in nothing:
            allowed = next((value for value in nothing if value is not None), None)
            hint = "leave it out" if allowed is None else f"leave it out or send {allowed}"
            raise InvalidRequestError(f"{field}={options[field]!r} is not supported; {hint}{_REASONS.get(field, '')}")
