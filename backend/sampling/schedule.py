"""How many positions a step commits, for the rules that rank the masked positions."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray


def even(block_length: int, steps_per_block: int, step: int) -> int:
    """Positions to commit in `step` so that the block takes `steps_per_block`; at least one.

    The remainder goes to the earliest steps (LLaDA's `get_num_transfer_tokens`).
    """
    base, remainder = divmod(block_length, steps_per_block)
    return max(base + (step < remainder), 1)


def timesteps(num_masked: int, steps_per_block: int, step: int) -> int:
    """Positions to commit of the `num_masked` left, by Dream's timesteps: int(n * (1 - s / t)), in float32.

    The last step takes all. Unlike Dream, a step commits at least one: where its own count is 0 (its
    first step, with as many steps as positions) the block is done earlier.
    """
    if step >= steps_per_block - 1:
        return num_masked
    return max(int(np.float32(num_masked) * _shares(steps_per_block)[step]), 1)


@lru_cache(maxsize=256)
def _shares(num_steps: int) -> NDArray[np.float32]:
    """1 - s / t of each step, t going from 1 to 0.001."""
    times: NDArray[np.float32] = torch.linspace(1, 1e-3, num_steps + 1).numpy()  # numpy's own rounds differently
    return 1 - times[1:] / times[:-1]
