"""What travels between router and workers. Token ids go as bytes: the codec is MessagePack."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from backend.core.request import Request
from backend.core.sampling_params import SamplingParams


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return array("i", tokens).tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()


def block_dispatch(request: Request) -> dict[str, Any]:
    """Router -> worker: run the current block of `request`. A worker knows it by its dispatch alone."""
    return {
        "request_id": f"{request.request_id}/{request.block.index}.{request.block.attempt}",
        "attempt": request.block.attempt,
        "arrival_time": request.arrival_time,
        "prompt": pack_tokens(request.prompt),
        "finished_blocks": pack_tokens(request.response),
        "known": pack_tokens(request.block.known),
        "params": asdict(request.params),
    }


def read_dispatch(message: dict[str, Any]) -> Request:
    """The request that `block_dispatch` described.

    Raises:
        InvalidRequestError: parameters out of range.
        KeyError, TypeError: not such a message.
    """
    params = dict(message["params"])
    params["stop_token_ids"] = tuple(params["stop_token_ids"])
    return Request(
        message["request_id"],
        unpack_tokens(message["prompt"]),
        SamplingParams(**params),
        message["arrival_time"],
        finished_blocks=unpack_tokens(message["finished_blocks"]),
        known=unpack_tokens(message["known"]),
        attempt=message["attempt"],
    )


@dataclass(frozen=True)
class BlockNews:
    """Worker -> router: one message of a block's stream.

    Attributes:
        tokens: what the frontier moved over since the last message.
        is_done: the last message of the block.
        error: why the request failed; with `is_refusal` the request itself is at fault.
        seconds: at the end, per phase: queue, prefill, denoising.
        num_steps: forwards so far.
    """

    tokens: Sequence[int]
    is_done: bool = False
    error: str = ""
    is_refusal: bool = False
    seconds: Sequence[float] = (0.0, 0.0, 0.0)
    num_steps: int = 0

    def to_wire(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": pack_tokens(self.tokens), "seconds": list(self.seconds)}

    @classmethod
    def from_wire(cls, message: dict[str, Any]) -> BlockNews:
        return cls(**{**message, "tokens": unpack_tokens(message["tokens"])})


@dataclass(frozen=True)
class ModelCard:
    """What a router must know of the model that its workers serve.

    Attributes:
        fingerprint: equal for workers that give the same answers.
        context_length: prompt + canvas in tokens, at most.
    """

    fingerprint: str
    vocab_size: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    context_length: int


@dataclass(frozen=True)
class LoadReport:
    """Worker -> every router, over NATS, several times a second.

    Attributes:
        capacity_tokens: size of the KV pool: the longest sequence that can ever fit.
    """

    worker_id: int
    model: ModelCard
    capacity_tokens: int
    free_pages: int
    num_pages: int
    num_waiting: int
    num_denoising: int
    waiting_tokens: int

    @classmethod
    def from_wire(cls, message: dict[str, Any]) -> LoadReport:
        """Raises TypeError or KeyError for what is no load report; keys of a newer version are ignored."""
        values = {field.name: message[field.name] for field in fields(cls)}
        card = {field.name: message["model"][field.name] for field in fields(ModelCard)}
        card["eos_token_ids"] = tuple(card["eos_token_ids"])
        return cls(**{**values, "model": ModelCard(**card)})
