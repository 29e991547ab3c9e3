"""What travels between router and workers. Token ids go as bytes: the codec is MessagePack."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from backend.core.logprobs import TokenLogprobs
from backend.core.request import Request, RequestStatus
from backend.core.sampling_params import SamplingParams
from backend.core.step import NO_TIME, PhaseSeconds


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return array("i", tokens).tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()


def pack_logprobs(logprobs: Sequence[TokenLogprobs]) -> list[bytes]:
    """Three arrays: own logprobs, and as many ids and logprobs of likely tokens for each of them."""
    top = [pair for of in logprobs for pair in of.top]
    own, others = (array("d", values).tobytes() for values in ([of.logprob for of in logprobs], [p for _, p in top]))
    return [own, pack_tokens([token for token, _ in top]), others]


def unpack_logprobs(data: Sequence[bytes]) -> tuple[TokenLogprobs, ...]:
    own, others = array("d"), array("d")
    own.frombytes(data[0])
    others.frombytes(data[2])
    top = list(zip(unpack_tokens(data[1]), others, strict=True))
    num_top = len(top) // max(len(own), 1)
    return tuple(TokenLogprobs(logprob, tuple(top[i * num_top :][:num_top])) for i, logprob in enumerate(own))


@dataclass(frozen=True)
class HeldKV:
    """Where the KV of a prefilled block lies and what its prefill committed; the router passes it on.

    With `is_running` the prefill has only begun: its KV can be read layer by layer, and a second
    `HeldKV` says what it committed.

    Attributes:
        worker_id: the prefill worker, which knows it as `key`.
        pages: its pages there; they hold this KV for as long as their stamp is `stamp`.
        commits: (offset in block, token) pairs.
        logprobs: of each of these, if the request asks for them.
    """

    worker_id: int
    key: str
    pages: Sequence[int]
    stamp: int
    commits: Sequence[tuple[int, int]]
    is_running: bool = False
    logprobs: Sequence[TokenLogprobs] = ()

    def to_wire(self) -> dict[str, Any]:
        commits = pack_tokens([number for pair in self.commits for number in pair])
        logprobs = pack_logprobs(self.logprobs)
        return {**asdict(self), "pages": pack_tokens(self.pages), "commits": commits, "logprobs": logprobs}

    @classmethod
    def from_wire(cls, message: dict[str, Any]) -> HeldKV:
        numbers = unpack_tokens(message["commits"])
        commits = list(zip(numbers[::2], numbers[1::2], strict=True))
        logprobs = unpack_logprobs(message["logprobs"])
        return cls(**{**message, "pages": unpack_tokens(message["pages"]), "commits": commits, "logprobs": logprobs})


def block_dispatch(request: Request, held: HeldKV | None = None) -> dict[str, Any]:
    """Router -> worker: run the current block of `request`. A worker knows it by its dispatch alone.

    With `held` it has been prefilled already: read its KV and denoise it.
    """
    return {
        "request_id": f"{request.request_id}/{request.block.index}.{request.block.attempt}",
        "attempt": request.block.attempt,
        "arrival_time": request.arrival_time,
        "prompt": pack_tokens(request.prompt),
        "finished_blocks": pack_tokens(request.response),
        "known": pack_tokens(request.block.known),
        "params": asdict(request.params),
        "held": held.to_wire() if held else None,
    }


def read_dispatch(message: dict[str, Any]) -> tuple[Request, HeldKV | None]:
    """The request that `block_dispatch` described, and where its KV lies if it has been prefilled.

    Raises:
        InvalidRequestError: parameters out of range.
        KeyError, TypeError: not such a message.
    """
    params = dict(message["params"])
    params["stop_token_ids"] = tuple(params["stop_token_ids"])
    held = HeldKV.from_wire(message["held"]) if message["held"] else None
    request = Request(
        message["request_id"],
        unpack_tokens(message["prompt"]),
        SamplingParams(**params),
        message["arrival_time"],
        finished_blocks=unpack_tokens(message["finished_blocks"]),
        known=unpack_tokens(message["known"]),
        attempt=message["attempt"],
        prefilled=held.commits if held and not held.is_running else None,
        prefilled_logprobs=held.logprobs if held else (),
    )
    if held and held.is_running:
        request.status = RequestStatus.WAITING_FOR_KV
    return request, held


@dataclass(frozen=True)
class BlockNews:
    """Worker -> router: one message of a block's stream.

    The first says that the block is prefilled, or that its KV has been read; one before it, that the
    worker waits to hear what a prefill that still runs commits. A prefill worker says
    `held` when a colocated worker has to go on with the block, and `is_done` when its pages are free.

    Attributes:
        tokens: what the frontier moved over since the last message.
        is_done: the last message of the block.
        error: why the block failed; with `is_refusal` the request itself is at fault, with
            `is_retryable` another attempt may succeed.
        seconds: with `held` and at the end, per phase (`PHASES`).
        num_steps: forwards so far.
        logprobs: of each of the tokens, if the request asks for them.
    """

    tokens: Sequence[int]
    is_done: bool = False
    held: HeldKV | None = None
    error: str = ""
    is_refusal: bool = False
    is_retryable: bool = False
    seconds: PhaseSeconds = NO_TIME
    num_steps: int = 0
    logprobs: Sequence[TokenLogprobs] = ()

    def to_wire(self) -> dict[str, Any]:
        message = {field.name: getattr(self, field.name) for field in fields(self)}
        held = self.held.to_wire() if self.held else None
        logprobs = pack_logprobs(self.logprobs) if self.logprobs else None
        tokens = pack_tokens(self.tokens)
        return {**message, "tokens": tokens, "held": held, "seconds": list(self.seconds), "logprobs": logprobs}

    @classmethod
    def from_wire(cls, message: dict[str, Any]) -> BlockNews:
        held = HeldKV.from_wire(message["held"]) if message["held"] else None
        seconds = tuple(message["seconds"])
        logprobs = unpack_logprobs(message["logprobs"]) if message["logprobs"] else ()
        tokens = unpack_tokens(message["tokens"])
        return cls(**{**message, "tokens": tokens, "held": held, "seconds": seconds, "logprobs": logprobs})


@dataclass(frozen=True)
class ModelCard:
    """What a router must know of the model that its workers serve.

    Attributes:
        fingerprint: equal for workers that give the same answers.
        context_length: prompt + canvas in tokens, at most.
        defaults: fields of `SamplingParams` of requests that do not name them.
    """

    fingerprint: str
    vocab_size: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    context_length: int
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadReport:
    """Worker -> every router, over NATS, several times a second.

    Attributes:
        component: what kind of worker it is.
        is_draining: it finishes what it has and takes no more.
    """

    worker_id: int
    component: str
    model: ModelCard
    is_draining: bool
    page_size: int
    num_pages: int
    free_pages: int
    num_waiting: int
    num_denoising: int
    waiting_tokens: int

    @property
    def capacity_tokens(self) -> int:
        """Size of the KV pool: the longest sequence that can ever fit."""
        return self.num_pages * self.page_size

    @classmethod
    def from_wire(cls, message: dict[str, Any]) -> LoadReport:
        """Raises TypeError or KeyError for what is no load report; keys of a newer version are ignored."""
        values = {field.name: message[field.name] for field in fields(cls)}
        card = {field.name: message["model"][field.name] for field in fields(ModelCard)}
        card["eos_token_ids"] = tuple(card["eos_token_ids"])
        return cls(**{**values, "model": ModelCard(**card)})
