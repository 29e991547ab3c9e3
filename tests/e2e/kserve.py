"""The official KServe client, with text in and text out."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import tritonclient.grpc as triton

from backend.core.logprobs import TokenLogprobs
from tests.e2e.reference import Answer
from tests.e2e.served import MODEL_NAME


class Kserve:
    """A connection; closed when the block that it is opened for is left."""

    def __init__(self, url: str) -> None:
        self._client = triton.InferenceServerClient(url)

    def __enter__(self) -> Kserve:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def infer(self, prompt: str, **parameters: Any) -> Answer:
        return _answer([self._client.infer(MODEL_NAME, [_text(prompt)], parameters=parameters)])

    def infer_ids(self, ids: list[int], **parameters: Any) -> Answer:
        tensor = triton.InferInput("input_ids", [len(ids)], "INT64")
        tensor.set_data_from_numpy(np.array(ids, dtype=np.int64))
        return _answer([self._client.infer(MODEL_NAME, [tensor], parameters=parameters)])

    def stream(self, prompt: str, **parameters: Any) -> tuple[Answer, int]:
        """The answer and in how many responses it came."""
        replies: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
        self._client.start_stream(lambda result, error: replies.put((result, error)))
        try:
            parameters = {**parameters, "streaming": True}
            self._client.async_stream_infer(MODEL_NAME, [_text(prompt)], parameters=parameters)
            results: list[Any] = []
            while not results or "finish_reason" not in results[-1].get_response().parameters:
                result, error = replies.get(timeout=60)
                if error is not None:
                    raise error
                results.append(result)
        finally:
            self._client.stop_stream()
        return _answer(results), len(results)


def _text(prompt: str) -> triton.InferInput:
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([prompt.encode()], dtype=np.object_))
    return tensor


def _answer(results: list[Any]) -> Answer:
    text = b"".join(result.as_numpy("text_output")[0] for result in results).decode()
    tokens = [int(token) for result in results for token in result.as_numpy("output_ids")]
    last = results[-1].get_response().parameters
    assert last["completion_tokens"].int64_param == len(tokens)
    logprobs = tuple(of for result in results for of in _logprobs(result))
    reason = last["finish_reason"].string_param
    return Answer(text, tokens, reason, last["prompt_tokens"].int64_param, 0, logprobs)


def _logprobs(result: Any) -> list[TokenLogprobs]:
    """Of the tokens of one response; nothing if it says nothing of them."""
    own = result.as_numpy("logprobs")
    if own is None:
        return []
    ids, top = result.as_numpy("top_token_ids"), result.as_numpy("top_logprobs")
    assert ids.shape == top.shape and (len(own), len(ids)) == (len(result.as_numpy("output_ids")),) * 2
    return [
        TokenLogprobs(float(logprob), tuple(zip(row.tolist(), values.tolist(), strict=True)))
        for logprob, row, values in zip(own, ids, top, strict=True)
    ]
