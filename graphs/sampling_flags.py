"""Flags of how to denoise, alike in every command that asks a model something."""

from __future__ import annotations

import argparse

DEFAULT_BLOCK_LENGTH = 32
# Options of diffusion models, which OpenAI's API has no place for: there they travel as annotations.
DLLM_FLAGS = {
    "unmasking": (str, "which positions a step unmasks: threshold, factor, quota, entropy, margin, ..."),
    "confidence_threshold": (float, "unmask what the model is at least this sure of"),
    "factor": (float, "of the rule of that name: the larger, the more are unmasked in a step"),
    "steps_per_block": (int, "steps that a block takes by the other rules"),
    "quota_schedule": (str, "how these share the block among the steps: even, timesteps"),
    "block_length": (int, f"positions denoised together (default: {DEFAULT_BLOCK_LENGTH})"),
    "canvas_length": (int, "positions of the whole response region"),
    "cache_policy": (str, "which KV a step may reuse: none, prefix, dual, dkv-decode, dkv-prefill, dkv-greedy"),
    "cache_refresh_interval": (int, "steps after which all KV is computed anew within a block; 0: never"),
    "cache_window": (int, "positions around each commit that dkv-greedy computes anew"),
    "remask_below": (float, "mask again, once, what the model was less sure of than this"),
}


# Options that every API has.
STANDARD_FLAGS = {
    "max_tokens": (int, "longest answer"),
    "temperature": (float, "0 takes the most probable token"),
    "top_p": (float, "draw from the fewest tokens whose share reaches it"),
    "seed": (int, "same seed, same answer"),
}


def add(parser: argparse._ActionsContainer) -> tuple[str, ...]:
    """Adds a flag for each of these options and returns their names; absent flags parse to None."""
    flags = STANDARD_FLAGS | DLLM_FLAGS
    for name, (kind, text) in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=name.upper(), help=text)
    return tuple(flags)
