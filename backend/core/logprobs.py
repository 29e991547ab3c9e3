"""What a client may learn of how likely a token was."""

from __future__ import annotations

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the model's plain probabilities (temperature 1, nothing truncated) at the
    step that committed a token, among the tokens that were candidates there.

    Attributes:
        logprob: of the committed token.
        top: (token, logprob) of the most likely ones, the best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
