from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backend.core.request import Request
from backend.core.sampling_params import InvalidRequestError, SamplingParams
from components.protocol import ModelCard
from components.request_parser import (
    Limits,
    build_request,
    dllm_options,
    parse_options,
    parse_tokens_request,
    refuse_unsupported,
)

CARD = ModelCard("abc", vocab_size=100, mask_token_id=2, eos_token_ids=(1,), context_length=512)
LIMITS = Limits(context_length=512, default_canvas_length=128)


def build(prompt: Any = (10, 11), **options: Any) -> Request:
    return build_request("r", prompt, options, CARD, LIMITS, 3.0)


def parse(metadata: dict[str, str] | None = None, **message: Any) -> Request:
    message = {"token_ids": [10, 11], **message}
    return parse_tokens_request(message, metadata or {}, "r", CARD, LIMITS, 3.0)


def test_a_checkpoint_may_name_what_a_request_does_not() -> None:
    defaults = {
        "temperature": 0.2,
        "block_length": 16,
        "steps_per_block": 16,
        "canvas_length": 64,
        "unmasking": "margin",
    }
    card = replace(CARD, defaults=defaults)

    def params(**options: Any) -> SamplingParams:
        return build_request("r", [10], options, card, LIMITS, 3.0).params

    plain = params()
    assert (plain.temperature, plain.block_length, plain.canvas_length, plain.unmasking) == (0.2, 16, 64, "margin")
    assert params(temperature=0.0).temperature == 0.0
    assert params(max_tokens=20).canvas_length == 32, "the answer's length was asked for"
    assert params(block_length=8).steps_per_block == 8, "16 steps were meant for 16 positions"


def test_options_of_annotations_and_headers() -> None:
    options = dllm_options(
        ["dllm.block_length: 16", "somebody.else:3", "ignore me"],
        {"block-length": "8", "Unmasking": "quota"},
    )
    assert options == {"block_length": "16", "unmasking": "quota"}


@pytest.mark.parametrize(
    ("annotations", "metadata"), [(["dllm.blok_length:16"], {}), ([], {"blok_length": "16"}), (["dllm.:16"], {})]
)
def test_an_unknown_option_is_refused_with_the_known_ones(annotations: list[str], metadata: dict[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match="is not known; allowed: block_length, canvas_length"):
        dllm_options(annotations, metadata)


def test_an_option_without_a_value_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="dllm.block_length:VALUE"):
        dllm_options(["dllm.block_length"], {})


def test_numbers_are_read() -> None:
    read = parse_options({"block_length": "16", "confidence_threshold": "0.5", "unmasking": "quota", "factor": "1"})
    assert read == {"block_length": 16, "confidence_threshold": 0.5, "unmasking": "quota", "factor": 1.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_length": "x"}, "block_length='x' is out of range; allowed: a whole number from 1 to 256"),
        ({"steps_per_block": "1.5"}, "steps_per_block='1.5' is out of range; allowed: a whole number from 1 to 32"),
        ({"canvas_length": ""}, "canvas_length='' is out of range"),
        ({"confidence_threshold": "high"}, "confidence_threshold='high' is not a number; allowed: 0 to 1"),
        ({"confidence_threshold": "nan"}, "confidence_threshold=nan is not a number; allowed: 0 to 1"),
    ],
)
def test_what_is_no_number_is_refused_by_name(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        build(**parse_options(options))
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "canvas", "max_tokens"),
    [
        ({}, 128, 128),
        ({"max_tokens": 1}, 32, 1),
        ({"max_tokens": 32}, 32, 32),
        ({"max_tokens": 33}, 64, 33),
        ({"canvas_length": 96}, 96, 96),
        ({"canvas_length": 96, "max_tokens": 10}, 96, 10),
        ({"block_length": 48}, 144, 144),
        ({"block_length": 5, "max_tokens": 3}, 5, 3),
        ({"max_tokens": None, "block_length": None}, 128, 128),
    ],
)
def test_the_canvas(options: dict[str, Any], canvas: int, max_tokens: int) -> None:
    params = build(**options).params
    assert (params.canvas_length, params.max_tokens) == (canvas, max_tokens)


def test_defaults() -> None:
    params = build().params
    assert (params.block_length, params.steps_per_block, params.unmasking) == (32, 32, "threshold")
    assert (params.temperature, params.cache_policy, params.stop_token_ids) == (0.0, "dual", (1,))
    assert build(block_length=8).params.steps_per_block == 8


def test_without_a_seed_each_request_gets_one_of_its_own() -> None:
    assert build().params.seed != build().params.seed
    assert build(seed=5).params.seed == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": -3}, "max_tokens=-3"),
        ({"max_tokens": 2.5}, "max_tokens=2.5"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"max_tokens": "ten"}, "max_tokens='ten'"),
        ({"max_tokens": 65, "canvas_length": 64}, "max_tokens=65 does not fit canvas_length=64"),
        ({"canvas_length": 0}, "canvas_length=0"),
        ({"canvas_length": -32}, "canvas_length=-32"),
        ({"canvas_length": 40}, "canvas_length=40 must be a multiple of block_length=32"),
        ({"block_length": 0}, "block_length=0"),
        ({"block_length": 257}, "block_length=257"),
        ({"block_length": 8, "steps_per_block": 9}, "steps_per_block=9"),
        ({"temperature": 2.5}, "temperature=2.5"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"seed": 2**63}, "seed="),
        ({"top_p": 1.5}, "top_p=1.5 is out of range; allowed: 0 to 1"),
        ({"top_p": -0.1}, "top_p=-0.1 is out of range"),
        ({"min_p": 2}, "min_p=2 is out of range; allowed: 0 to 1"),
        ({"min_p": True}, "min_p=True is not a number"),
        ({"top_k": -2}, "top_k=-2 is out of range; allowed: a whole number from 0 to 2147483647"),
        ({"top_k": 3.0}, "top_k=3.0 is out of range"),
        ({"min_tokens": -1}, "min_tokens=-1 is out of range"),
        ({"min_tokens": 33, "max_tokens": 32}, "min_tokens=33 is out of range; allowed: a whole number from 0 to 32"),
        ({"logprobs": 21}, "logprobs=21 is out of range; allowed: a whole number from 0 to 20"),
        ({"logprobs": True}, "logprobs=True is out of range"),
        ({"factor": -1}, "factor=-1 is out of range; allowed: 0 to 256"),
        ({"quota_schedule": "cosine"}, "quota_schedule='cosine' is not known; allowed: even, timesteps"),
        ({"unmasking": "all"}, "unmasking='all' is not known; allowed: threshold, paced_threshold, factor, quota, "),
        ({"cache_policy": "all"}, "cache_policy='all' is not known; allowed: none, prefix, dual, "),
    ],
)
def test_a_bad_value_is_refused_by_the_name_that_was_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        build(**options)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([5, 100], "prompt token 1 is 100, outside the vocabulary; allowed: 0 to 99"),
        ([-1], "prompt token 0 is -1, outside the vocabulary"),
        ([5, 2], "prompt token 1 is the mask token (2)"),
    ],
)
def test_a_bad_prompt_is_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        build(prompt)
    assert str(refusal.value).startswith(message)


def test_prompt_and_canvas_must_fit_the_context() -> None:
    assert build([5] * 480, max_tokens=32).sequence_length == 512
    with pytest.raises(InvalidRequestError, match=r"prompt \(481 tokens\) \+ canvas \(32 tokens\) = 513 is over"):
        build([5] * 481, max_tokens=1)


def test_stop_tokens() -> None:
    assert build(stop_token_ids=(7, 1)).params.stop_token_ids == (1, 7)
    assert build(stop_token_ids=(7,), ignore_eos=True).params.stop_token_ids == ()
    # What the frontend knows of the tokenizer may be more than the model has.
    assert build(stop_token_ids=(7,), eos_token_ids=(8, 100)).params.stop_token_ids == (1, 7, 8)


def test_stop_tokens_have_to_leave_something_for_min_tokens() -> None:
    everything = tuple(range(100))
    assert len(build(stop_token_ids=everything).params.stop_token_ids) == 100
    assert build(stop_token_ids=everything[:99], min_tokens=1).params.min_tokens == 1
    with pytest.raises(InvalidRequestError, match="stop_token_ids names the whole vocabulary"):
        build(stop_token_ids=everything, min_tokens=1)


@pytest.mark.parametrize("token", [100, -1, 2.0, True, "7"])
def test_a_stop_token_outside_the_vocabulary_is_refused(token: object) -> None:
    with pytest.raises(InvalidRequestError, match="stop_token_ids holds .*, outside the vocabulary; allowed: 0 to 99"):
        build(stop_token_ids=(7, token))


def test_a_request_of_the_openai_frontend() -> None:
    request = parse(
        {"steps_per_block": "8"},
        stop_conditions={"max_tokens": 40, "stop": ["x"], "stop_token_ids_hidden": [7], "min_tokens": 5},
        sampling_options={"temperature": 0.5, "seed": 9, "n": 1, "top_p": 0.9, "top_k": 40, "min_p": None},
        output_options={"skip_special_tokens": True, "logprobs": 3},
        eos_token_ids=[1],
        annotations=["dllm.unmasking:quota"],
    )
    params = request.params
    assert (request.request_id, request.prompt, request.arrival_time) == ("r", (10, 11), 3.0)
    assert (params.max_tokens, params.canvas_length, params.steps_per_block) == (40, 64, 8)
    assert (params.temperature, params.seed, params.unmasking) == (0.5, 9, "quota")
    assert (params.top_p, params.top_k, params.min_p) == (0.9, 40, 0.0)
    assert (params.stop_token_ids, params.min_tokens, params.logprobs) == ((1, 7), 5, 3)


def test_a_request_may_leave_out_everything_but_its_prompt() -> None:
    assert parse(annotations=None, stop_conditions=None).params.max_tokens == 128


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("sampling_options", "n", 2),
        ("sampling_options", "best_of", 2),
        ("sampling_options", "presence_penalty", 0.5),
        ("sampling_options", "frequency_penalty", 0.5),
        ("sampling_options", "repetition_penalty", 1.1),
        ("sampling_options", "guided_decoding", {"json": {}}),
        ("output_options", "prompt_logprobs", 0),
    ],
)
def test_what_is_not_served_is_refused(part: str, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field}=.* is not supported; leave it out"):
        parse(**{part: {field: value}})


def test_asking_for_nothing_is_no_reason_to_refuse() -> None:
    refuse_unsupported({"n": 1, "presence_penalty": 0.0, "prompt_logprobs": None, "other": 3})


def test_minus_1_and_0_are_both_all_tokens() -> None:
    assert build(top_k=-1).params.top_k == build(top_k=0).params.top_k == build().params.top_k == 0
