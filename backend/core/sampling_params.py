"""What a request may ask for, checked in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from backend.core.cache_policy import CACHE_POLICIES, CachePolicy, Recompute

UNMASKING = ("threshold", "paced_threshold", "factor", "quota", "entropy", "margin", "maskgit_plus", "random")
QUOTA_SCHEDULES = ("even", "timesteps")
MAX_BLOCK_LENGTH = 256
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_LOGPROBS = 20


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
            `confidence_threshold`, and always the best one (Fast-dLLM); "paced_threshold" of these no more
            than `quota_schedule: even` would have committed by then (Fast-dLLM's Dream without a cache);
            "factor" goes on from the best one for as long as the n-th confidence is at least
            1 - `factor` / (n + 1) (Fast-dLLM). The others commit a number of positions: the most confident
            (LLaDA's low-confidence remasking) with "quota"; those of the least entropy, the largest lead
            of the first token over the second, or the likeliest drawn token with "entropy", "margin" and
            "maskgit_plus" (Dream); any with "random".
        quota_schedule: that number is `block_length / steps_per_block` with "even", and with
            "timesteps" Dream's share int(n * (1 - s / t)) of the n positions left.
        temperature: 0 is argmax; otherwise tokens are drawn from softmax(logits / temperature), of
            which `top_k`, then `top_p`, then `min_p` leave the most likely ones.
        top_k: so many tokens; 0 is all.
        top_p: the fewest tokens whose share reaches it; 1 is all.
        min_p: tokens at least so likely as this share of the most likely one; 0 is all.
        seed: draws depend on (seed, block, step, position) alone.
        stop_token_ids: committing one of these ends the answer; it is not returned.
        min_tokens: no position before it is given one of `stop_token_ids`.
        remask_below: once a block is whole, its tokens that were committed with a probability below this are
            masked again, once, and decided in view of all others; nothing of the block is streamed before.
        logprobs: None, or so many of the most likely tokens are told with each token's own logprob.
        cache_policy: see `CACHE_POLICIES`.
        cache_refresh_interval: every so many steps of a block all KV is computed anew; 0 is never, None
            the policy's own.
        cache_window: positions that "dkv-greedy" computes around each one that it commits.

    Raises:
        InvalidRequestError: a value out of its range.
    """

    max_tokens: int
    canvas_length: int
    block_length: int = 32
    unmasking: str = "threshold"
    confidence_threshold: float = 0.9
    factor: float = 1.0
    steps_per_block: int = 32
    quota_schedule: str = "even"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    remask_below: float = 0.0
    logprobs: int | None = None
    cache_policy: str = "dual"
    cache_refresh_interval: int | None = None
    cache_window: int = 4

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
        _name("unmasking", self.unmasking, UNMASKING)
        _number("confidence_threshold", self.confidence_threshold, 0.0, 1.0)
        _number("factor", self.factor, 0.0, float(MAX_BLOCK_LENGTH))
        _integer("steps_per_block", self.steps_per_block, 1, self.block_length)
        _name("quota_schedule", self.quota_schedule, QUOTA_SCHEDULES)
        _number("temperature", self.temperature, 0.0, 2.0)
        _integer("top_k", self.top_k, 0, MAX_TOP_K)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _number("remask_below", self.remask_below, 0.0, 1.0)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _name("cache_policy", self.cache_policy, tuple(CACHE_POLICIES))
        if self.cache_refresh_interval is not None:
            _integer("cache_refresh_interval", self.cache_refresh_interval, 0, MAX_BLOCK_LENGTH)
        _integer("cache_window", self.cache_window, 0, MAX_BLOCK_LENGTH)
        if self.policy.recompute is Recompute.NEARBY and self.unmasking != "random":
            raise InvalidRequestError(
                f"cache_policy={self.cache_policy!r} has to know what a step will commit before it runs; "
                f"unmasking={self.unmasking!r} cannot tell; allowed: random"
            )

    @cached_property
    def max_steps_per_block(self) -> int:
        """No block takes more: each step commits a position, at most twice the same (`remask_below`),
        but for those of "timesteps" whose share is nothing."""
        return 2 * self.block_length + self.steps_per_block

    @cached_property
    def policy(self) -> CachePolicy:
        return CACHE_POLICIES[self.cache_policy]


def _integer(field: str, value: object, low: int, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        allowed = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
        raise InvalidRequestError(f"{field}={value!r} is out of range; allowed: {allowed}")


def _name(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidRequestError(f"{field}={value!r} is not known; allowed: {', '.join(allowed)}")


def _number(field: str, value: object, low: float, high: float) -> None:
    is_finite = not isinstance(value, float) or math.isfinite(value)  # an int may be too large for a float
    if not isinstance(value, int | float) or isinstance(value, bool) or not is_finite:
        raise InvalidRequestError(f"{field}={value!r} is not a number; allowed: {low:g} to {high:g}")
    if not low <= value <= high:
        raise InvalidRequestError(f"{field}={value!r} is out of range; allowed: {low:g} to {high:g}")
