from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from backend.core.logprobs import TokenLogprobs
from components.chunks import Piece, chunk


def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    made.decoder = decoders.ByteLevel()
    return made


def test_a_piece_without_logprobs() -> None:
    assert chunk(Piece([5, 6], "né"), tokenizer()) == {"token_ids": [5, 6], "text": "né", "index": 0}
    assert chunk(Piece([], "", "stop"), tokenizer())["finish_reason"] == "stop"


def test_logprobs_in_the_form_of_dynamos_frontend() -> None:
    made = tokenizer()
    a, b = made.token_to_id("a"), made.token_to_id("b")
    piece = Piece([b, a], "ba", logprobs=[TokenLogprobs(-2.0, ((a, -0.5), (b, -2.0))), TokenLogprobs(-0.25)])
    message = chunk(piece, made)
    assert message["tokens"] == ["b", "a"]
    assert message["log_probs"] == [-2.0, -0.25]
    assert message["top_logprobs"] == [
        [
            {"rank": 1, "token_id": a, "token": "a", "logprob": -0.5, "bytes": [97]},
            {"rank": 2, "token_id": b, "token": "b", "logprob": -2.0, "bytes": [98]},
        ],
        [],
    ]
