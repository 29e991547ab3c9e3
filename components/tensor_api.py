"""The KServe side of the router: a Tensor model of the same name, for `tritonclient`.

Dynamo's own text route drops all request parameters, so the router tokenizes by itself. In:
`text_input` (BYTES [1]), or `input_ids` (INT64 [n]); options as request parameters. Out: `text_output`
(BYTES [1]), `output_ids` (INT64 [n]), with the parameter `logprobs` = k also `logprobs` (FP32 [n]),
`top_token_ids` (INT64 [n, k]) and `top_logprobs` (FP32 [n, k]), and, in the last response,
`finish_reason` and `usage` as response parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tritonclient.grpc.model_config_pb2 as triton

from backend.core.sampling_params import InvalidRequestError
from components.chunks import Piece
from components.request_parser import DLLM_OPTIONS, STANDARD_OPTIONS, UNSUPPORTED, boolean, refuse_unsupported
from components.text import TextProcessor

# What Dynamo's frontend and tritonclient add by themselves.
_FRONTEND = ("streaming", "stream", "id", "triton_enable_empty_final_response")
_STANDARD = (*STANDARD_OPTIONS, "logprobs")
PARAMETERS = (*_STANDARD, "stop", "chat_template", *DLLM_OPTIONS)


def model_config(name: str) -> bytes:
    """What `ModelMetadata` and `ModelConfig` tell a client, as a serialized Triton ModelConfig."""
    config = triton.ModelConfig(name=name, platform="dynamo")
    for tensor, kind in (("text_input", triton.TYPE_STRING), ("input_ids", triton.TYPE_INT64)):
        config.input.append(triton.ModelInput(name=tensor, data_type=kind, dims=[-1], optional=True))
    for tensor, kind, rank in (
        ("text_output", triton.TYPE_STRING, 1),
        ("output_ids", triton.TYPE_INT64, 1),
        ("logprobs", triton.TYPE_FP32, 1),
        ("top_token_ids", triton.TYPE_INT64, 2),
        ("top_logprobs", triton.TYPE_FP32, 2),
    ):
        config.output.append(triton.ModelOutput(name=tensor, data_type=kind, dims=[-1] * rank))
    config.model_transaction_policy.decoupled = True
    return bytes(config.SerializeToString())


@dataclass(frozen=True)
class TensorRequest:
    """A parsed request: what the core needs, what the text side needs."""

    prompt: Sequence[int]
    options: Mapping[str, Any]
    stop: Sequence[str]
    is_streaming: bool


def parse_tensor_request(message: Mapping[str, Any], text: TextProcessor) -> TensorRequest:
    """Raises InvalidRequestError naming the tensor or parameter and what is allowed."""
    parameters = {key: _value(value) for key, value in (message.get("parameters") or {}).items()}
    is_streaming = any([boolean(key, parameters[key]) for key in ("stream", "streaming") if key in parameters])
    refuse_unsupported(parameters)
    options: dict[str, object] = {}
    stop: Sequence[str] = ()
    as_chat = True
    for key, value in parameters.items():
        if key == "stop":
            stop = _stop_strings(value)
        elif key == "chat_template":
            as_chat = boolean(key, value)
        elif key == "ignore_eos":
            options[key] = boolean(key, value)
        elif key == "stop_token_ids":
            options[key] = _token_ids(key, value)
        elif key in _STANDARD or key in DLLM_OPTIONS:
            options[key] = value
        elif key not in _FRONTEND and key not in UNSUPPORTED:
            raise InvalidRequestError(f"parameter {key!r} is not known; allowed: {', '.join(PARAMETERS)}")
    tensors = {tensor["metadata"]["name"]: tensor for tensor in message.get("tensors") or ()}
    # Dynamo describes the model by its own text route, whose clients ask to stream by an input.
    if (asks := tensors.pop("streaming", None)) is not None:
        is_streaming |= bool(asks["data"]["values"][0])
    return TensorRequest(_prompt(tensors, text, as_chat), options, stop, is_streaming)


def _value(value: object) -> object:
    """Dynamo wraps each parameter as {"int64": 32}, {"string": "dual"} and so on."""
    if isinstance(value, Mapping) and len(value) == 1:
        return next(iter(value.values()))
    return value


def _stop_strings(value: object) -> Sequence[str]:
    """One stop string, or several one per line: KServe parameters have no lists."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"stop={value!r} is not a string; several stop strings go on lines of their own")
    return [line for line in value.split("\n") if line]


def _token_ids(field: str, value: object) -> Sequence[int]:
    """One id, or several with commas between them: KServe parameters have no lists."""
    try:
        return [int(part) for part in str(value).split(",")]
    except ValueError:
        raise InvalidRequestError(f"{field}={value!r} is no list of token ids; write them as 7,9") from None


def _prompt(tensors: Mapping[str, Any], text: TextProcessor, as_chat: bool) -> Sequence[int]:
    unknown = tensors.keys() - {"text_input", "input_ids"}
    if unknown or len(tensors) != 1:
        raise InvalidRequestError(
            f"inputs {sorted(tensors)} given; send exactly one of text_input (BYTES [1]) and input_ids (INT64 [n])"
        )
    ((name, tensor),) = tensors.items()
    values = tensor["data"]["values"]
    kind = tensor["metadata"]["data_type"]
    if name == "input_ids":
        if kind != "Int64":
            raise InvalidRequestError(f"input_ids has data type {kind}; allowed: INT64")
        return [int(value) for value in values]
    if kind != "Bytes" or len(values) != 1:
        raise InvalidRequestError(f"text_input has {len(values)} values of type {kind}; allowed: 1 of BYTES")
    try:
        prompt = bytes(values[0]).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"text_input is not UTF-8: {error.reason}") from None
    if not prompt:
        raise InvalidRequestError("text_input is empty; at least 1 character is needed")
    return text.encode_chat(prompt) if as_chat else text.encode(prompt)


def tensor_response(
    model: str, piece: Piece, num_top: int | None = None, usage: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """One response in the form that Dynamo's KServe frontend takes.

    `num_top`: as asked for by `logprobs`, None if they were not.
    """
    parameters: dict[str, Any] = {key: {"int64": value} for key, value in (usage or {}).items()}
    if piece.finish_reason:
        parameters["finish_reason"] = {"string": piece.finish_reason}
    tensors = [
        _tensor("text_output", "Bytes", [list(piece.text.encode())]),
        _tensor("output_ids", "Int64", list(piece.tokens)),
    ]
    if num_top is not None:
        top = [pair for of in piece.logprobs for pair in of.top]
        shape = (len(piece.logprobs), num_top)
        tensors += [
            _tensor("logprobs", "Float32", [of.logprob for of in piece.logprobs]),
            _tensor("top_token_ids", "Int64", [token for token, _ in top], shape),
            _tensor("top_logprobs", "Float32", [logprob for _, logprob in top], shape),
        ]
    return {"model": model, "tensors": tensors, "parameters": parameters}


def _tensor(name: str, kind: str, values: list[Any], shape: Sequence[int] = ()) -> dict[str, Any]:
    metadata = {"name": name, "data_type": kind, "shape": list(shape or [len(values)])}
    return {"metadata": metadata, "data": {"data_type": kind, "values": values}}
