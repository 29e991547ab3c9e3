"""What a router's answer becomes on its way to Dynamo's OpenAI frontend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from backend.core.logprobs import TokenLogprobs
from backend.core.request import RequestStatus

FINISH_REASONS = {RequestStatus.FINISHED_STOP: "stop", RequestStatus.FINISHED_LENGTH: "length"}


@dataclass(frozen=True)
class Piece:
    """What became certain of an answer: token ids, their text, and at the end a finish reason.

    Attributes:
        logprobs: of each of the tokens, if the request asks for them. Their text may come with a
            later piece.
    """

    tokens: list[int]
    text: str
    finish_reason: str = ""
    logprobs: Sequence[TokenLogprobs] = ()

    def __add__(self, then: Piece) -> Piece:
        return Piece(
            self.tokens + then.tokens,
            self.text + then.text,
            then.finish_reason,
            (*self.logprobs, *then.logprobs),
        )


def chunk(piece: Piece, tokenizer: Tokenizer) -> dict[str, Any]:
    """One chunk of the frontend's stream."""
    message: dict[str, Any] = {"token_ids": piece.tokens, "text": piece.text, "index": 0}
    if piece.finish_reason:
        message["finish_reason"] = piece.finish_reason
    if piece.logprobs:
        # The frontend counts by these; with a text of ours it makes none itself.
        message["tokens"] = [_text(token, tokenizer) for token in piece.tokens]
        message["log_probs"] = [of.logprob for of in piece.logprobs]
        message["top_logprobs"] = [
            [_candidate(rank, *candidate, tokenizer) for rank, candidate in enumerate(of.top, 1)]
            for of in piece.logprobs
        ]
    return message


def _candidate(rank: int, token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    text = _text(token, tokenizer)
    return {"rank": rank, "token_id": token, "token": text, "logprob": logprob, "bytes": list(text.encode())}


def _text(token: int, tokenizer: Tokenizer) -> str:
    """As it reads behind another one: alone, some decoders take a space from its start."""
    once, twice = (tokenizer.decode([token] * count, skip_special_tokens=False) for count in (1, 2))
    return twice[len(once) :]
