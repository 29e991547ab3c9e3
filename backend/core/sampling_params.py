"""What a request may ask for, checked in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass

UNMASKING = ("threshold", "quota")
MAX_BLOCK_LENGTH = 256
MAX_SEED = 2**63 - 1


class InvalidRequestError(ValueError):
    """A request that cannot be served as asked; the message names the field and what is allowed."""


@dataclass(frozen=True)
class SamplingParams:
    """How the canvas is denoised and when the answer ends.

    Attributes:
        max_tokens: tokens returned at most.
        canvas_length: masked positions after the prompt, a multiple of `block_length`.
        block_length: positions denoised together.
        unmasking: "threshold" commits every masked position of the block whose confidence reaches
            `confidence_threshold`, and always the best one (Fast-dLLM); "quota" commits the best
            `block_length / steps_per_block` (LLaDA's low-confidence remasking).
        temperature: 0 is argmax; otherwise tokens are drawn from softmax(logits / temperature).
        seed: draws depend on (seed, block, step, position) alone.
        stop_token_ids: committing one of these ends the answer; it is not returned.

    Raises:
        InvalidRequestError: a value out of its range.
    """

    max_tokens: int
    canvas_length: int
    block_length: int = 32
    unmasking: str = "threshold"
    confidence_threshold: float = 0.9
    steps_per_block: int = 32
    temperature: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    cache_policy: str = "dual"

    def __post_init__(self) -> None:
        # In this order: an absent canvas_length or max_tokens is made from the ones before it.
        _integer("block_length", self.block_length, 1, MAX_BLOCK_LENGTH)
        _integer("canvas_length", self.canvas_length, 1, None)
        _integer("max_tokens", self.max_tokens, 1, None)
        if self.canvas_length % self.block_length:
            raise InvalidRequestError(
                f"canvas_length={self.canvas_length} must be a multiple of block_length={self.block_length}"
            )
        if self.max_tokens > self.canvas_length:
            raise InvalidRequestError(
                f"max_tokens={self.max_tokens} does not fit canvas_length={self.canvas_length}; "
                f"allowed: 1 to {self.canvas_length}"
            )
        if self.unmasking not in UNMASKING:
            raise InvalidRequestError(f"unmasking={self.unmasking!r} is not known; allowed: {', '.join(UNMASKING)}")
        _number("confidence_threshold", self.confidence_threshold, 0.0, 1.0)
        _integer("steps_per_block", self.steps_per_block, 1, self.block_length)
        _number("temperature", self.temperature, 0.0, 2.0)
        _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)


def _integer(field: str, value: object, low: int, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        allowed = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
        raise InvalidRequestError(f"{field}={value!r} is out of range; allowed: {allowed}")


def _number(field: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidRequestError(f"{field}={value!r} is not a number; allowed: {low:g} to {high:g}")
    if not low <= value <= high:
        raise InvalidRequestError(f"{field}={value!r} is out of range; allowed: {low:g} to {high:g}")
