"""Flags of how to denoise, alike in every command that asks a model something."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

DEFAULT_BLOCK_LENGTH = 32


def whole(text: str) -> int:
    """Raises ValueError where Python would read more as a whole number than the APIs do."""
    return int(_plain(text))


def number(text: str) -> float:
    """The same for a number."""
    value = float(_plain(text))
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is no number")
    return value


def _plain(text: str) -> str:
    if not text.isascii() or "_" in text:
        raise ValueError(f"{text!r} is no number")
    return text


# Options of diffusion models, which OpenAI's API has no place for: there they travel as annotations.
DLLM_FLAGS: dict[str, tuple[Callable[[str], object], str]] = {
    "unmasking": (str, "which positions a step unmasks: threshold, factor, quota, entropy, margin, ..."),
    "confidence_threshold": (number, "unmask what the model is at least this sure of"),
    "factor": (number, "of the rule of that name: the larger, the more are unmasked in a step"),
    "steps_per_block": (whole, "steps that a block takes by the other rules"),
    "quota_schedule": (str, "how these share the block among the steps: even, timesteps"),
    "block_length": (whole, f"positions denoised together (default: {DEFAULT_BLOCK_LENGTH})"),
    "canvas_length": (whole, "positions of the whole response region"),
    "cache_policy": (str, "which KV a step may reuse: none, prefix, dual, dkv-decode, dkv-prefill, dkv-greedy"),
    "cache_refresh_interval": (whole, "steps after which all KV is computed anew within a block; 0: never"),
    "cache_window": (whole, "positions around each commit that dkv-greedy computes anew"),
    "remask_below": (number, "mask again, once, what the model was less sure of than this"),
}


# Options that every API has.
STANDARD_FLAGS: dict[str, tuple[Callable[[str], object], str]] = {
    "max_tokens": (whole, "longest answer"),
    "min_tokens": (whole, "shortest answer"),
    "temperature": (number, "0 takes the most probable token"),
    "top_p": (number, "draw from the fewest tokens whose share reaches it"),
    "top_k": (whole, "draw from so many of the most likely tokens"),
    "min_p": (number, "draw from tokens at least so likely as this share of the most likely one"),
    "seed": (whole, "same seed, same answer"),
}


def add(parser: argparse._ActionsContainer) -> tuple[str, ...]:
    """Adds a flag for each of these options and returns their names; absent flags parse to None."""
    flags = STANDARD_FLAGS | DLLM_FLAGS
    for name, (kind, text) in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=name.upper(), help=text)
    return tuple(flags)
