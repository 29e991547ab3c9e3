from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc.model_config_pb2 as triton
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from backend.core.logprobs import TokenLogprobs
from backend.core.sampling_params import InvalidRequestError
from components.chunks import Piece
from components.request_parser import DLLM_OPTIONS
from components.tensor_api import TensorRequest, model_config, parse_tensor_request, tensor_response
from components.text import TextProcessor


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    directory = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "[{{ messages[0]['content'] }}]"
    Path(directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return TextProcessor(directory)


def tensor(name: str, kind: str, values: list[Any]) -> dict[str, Any]:
    metadata = {"name": name, "data_type": kind, "shape": [len(values)]}
    return {"metadata": metadata, "data": {"data_type": kind, "values": values}}


TEXT = tensor("text_input", "Bytes", [list(b"hi")])


def parse(text: TextProcessor, *tensors: dict[str, Any], **parameters: Any) -> TensorRequest:
    kinds = {bool: "bool", int: "int64", float: "double", str: "string"}
    wrapped = {key: {kinds[type(value)]: value} for key, value in parameters.items()}
    return parse_tensor_request({"tensors": list(tensors), "parameters": wrapped}, text)


def test_text_is_asked_as_a_chat(text: TextProcessor) -> None:
    request = parse(text, TEXT)
    assert text.tokenizer.decode(list(request.prompt)) == "[hi]"
    assert (request.options, list(request.stop), request.is_streaming) == ({}, [], False)


def test_text_may_be_asked_as_it_is(text: TextProcessor) -> None:
    request = parse(text, TEXT, chat_template=False)
    assert text.tokenizer.decode(list(request.prompt)) == "hi"


def test_ids_are_taken_as_they_are(text: TextProcessor) -> None:
    assert list(parse(text, tensor("input_ids", "Int64", [5, 6, 5])).prompt) == [5, 6, 5]


def test_parameters_become_options(text: TextProcessor) -> None:
    request = parse(
        text,
        TEXT,
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        ignore_eos=True,
        block_length=16,
        unmasking="quota",
        logprobs=2,
    )
    assert request.options == {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "ignore_eos": True,
        "block_length": 16,
        "unmasking": "quota",
        "logprobs": 2,
    }


@pytest.mark.parametrize("name", ["streaming", "stream"])
def test_streaming_is_asked_for(text: TextProcessor, name: str) -> None:
    assert parse(text, TEXT, **{name: True}).is_streaming
    assert not parse(text, TEXT, **{name: False}).is_streaming


def test_stop_tokens_stand_between_commas(text: TextProcessor) -> None:
    assert parse(text, TEXT, stop_token_ids="7, 9").options == {"stop_token_ids": [7, 9]}
    assert parse(text, TEXT, stop_token_ids=7, min_tokens=3).options == {"stop_token_ids": [7], "min_tokens": 3}


def test_stop_strings_stand_on_lines(text: TextProcessor) -> None:
    assert list(parse(text, TEXT, stop="one").stop) == ["one"]
    assert list(parse(text, TEXT, stop="one\n\n two").stop) == ["one", " two"]


def test_what_clients_and_dynamo_add_is_ignored(text: TextProcessor) -> None:
    request = parse(text, TEXT, triton_enable_empty_final_response=True, id="7", presence_penalty=0.0, n=1)
    assert request.options == {}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], r"inputs \[\] given; send exactly one of text_input"),
        ([TEXT, tensor("input_ids", "Int64", [5])], r"inputs \['input_ids', 'text_input'\] given"),
        ([tensor("prompt", "Bytes", [[1]])], r"inputs \['prompt'\] given"),
        ([TEXT, tensor("more", "Bytes", [[1]])], "given; send exactly one"),
        ([tensor("input_ids", "Int32", [5])], "input_ids has data type Int32; allowed: INT64"),
        ([tensor("text_input", "Int64", [5])], "text_input has 1 values of type Int64; allowed: 1 of BYTES"),
        ([tensor("text_input", "Bytes", [[1], [2]])], "text_input has 2 values"),
        ([tensor("text_input", "Bytes", [])], "text_input has 0 values"),
        ([tensor("text_input", "Bytes", [[]])], "text_input is empty"),
        ([tensor("text_input", "Bytes", [[0xFF]])], "text_input is not UTF-8"),
    ],
)
def test_bad_inputs_are_refused(text: TextProcessor, tensors: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse(text, *tensors)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_token": 3}, "parameter 'max_token' is not known; allowed: max_tokens, min_tokens, temperature"),
        ({"stop": 3}, "stop=3 is not a string"),
        ({"ignore_eos": 1}, "ignore_eos=1 is not a boolean; allowed: true, false"),
        ({"chat_template": "no"}, "chat_template='no' is not a boolean"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5 is not supported; leave it out or send 0"),
        ({"n": 2}, "n=2 is not supported"),
        ({"stop_token_ids": "7;9"}, "stop_token_ids='7;9' is no list of token ids; write them as 7,9"),
    ],
)
def test_bad_parameters_are_refused(text: TextProcessor, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse(text, TEXT, **parameters)


def test_a_response() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    response = tensor_response("m", Piece([5, 6], "né", "stop"), usage=usage)
    assert response["model"] == "m"
    out, ids = response["tensors"]
    assert bytes(out["data"]["values"][0]).decode() == "né" and out["metadata"]["shape"] == [1]
    assert ids["data"]["values"] == [5, 6] and ids["metadata"]["shape"] == [2]
    assert response["parameters"] == {
        "prompt_tokens": {"int64": 3},
        "completion_tokens": {"int64": 2},
        "finish_reason": {"string": "stop"},
    }


def test_a_response_on_the_way_has_no_finish_reason() -> None:
    assert tensor_response("m", Piece([], ""))["parameters"] == {}


@pytest.mark.parametrize("num_top", [0, 2])
def test_logprobs_are_tensors_of_their_own(num_top: int) -> None:
    told = [
        TokenLogprobs(-1.0, ((5, -1.0), (7, -2.0))[:num_top]),
        TokenLogprobs(-3.0, ((8, -0.5), (6, -3.0))[:num_top]),
    ]
    tensors = tensor_response("m", Piece([5, 6], "x", logprobs=told), num_top)["tensors"][2:]
    named = {tensor["metadata"]["name"]: tensor for tensor in tensors}
    shapes = {name: tensor["metadata"]["shape"] for name, tensor in named.items()}
    assert shapes == {"logprobs": [2], "top_token_ids": [2, num_top], "top_logprobs": [2, num_top]}
    values = {name: tensor["data"]["values"] for name, tensor in named.items()}
    assert values["logprobs"] == [-1.0, -3.0]
    assert values["top_token_ids"] == ([5, 7, 8, 6] if num_top else [])
    assert values["top_logprobs"] == ([-1.0, -2.0, -0.5, -3.0] if num_top else [])


def test_a_response_without_tokens_has_logprobs_of_none() -> None:
    tensors = tensor_response("m", Piece([], ""), 3)["tensors"][2:]
    assert [tensor["metadata"]["shape"] for tensor in tensors] == [[0], [0, 3], [0, 3]]


def test_the_model_describes_itself() -> None:
    config = triton.ModelConfig.FromString(model_config("m"))
    assert config.name == "m" and config.model_transaction_policy.decoupled
    assert [tensor.name for tensor in config.input] == ["text_input", "input_ids"]
    outputs = {tensor.name: len(tensor.dims) for tensor in config.output}
    assert outputs == {"text_output": 1, "output_ids": 1, "logprobs": 1, "top_token_ids": 2, "top_logprobs": 2}


def test_every_dllm_option_is_a_parameter(text: TextProcessor) -> None:
    assert set(parse(text, TEXT, **{option: 1 for option in DLLM_OPTIONS}).options) == set(DLLM_OPTIONS)
