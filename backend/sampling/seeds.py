"""`backend.core.counter_random` for whole batches: a draw depends on (seed, block, step, position) alone."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.core.counter_random import KEY_STEPS, LOW, MULTIPLIERS, ROUNDS

Counters = tuple[Tensor, Tensor, Tensor, Tensor]
"""(seed, block, step, position)."""


def uniform(seed: Tensor, block: Tensor, step: Tensor, position: Tensor, stream: int = 0) -> Tensor:
    """Numbers in [0, 1), float64 [N], from int64 counters [N] each; on any device, without waiting for it.

    Args:
        stream: which of several independent numbers for the same counters.
    """
    counter = torch.stack((block, step, position, torch.full_like(position, stream))) & LOW
    first, second = philox(counter, torch.stack((seed, seed >> 32)) & LOW)[:2]
    return (first << 21 | second >> 11).double() * 2.0**-53


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Four words of 32 random bits each, int64 [4, N], of `counter` [4, N] and `key` [2, N], words too."""
    rounds = torch.arange(ROUNDS, device=key.device)[:, None, None]
    keys = key + rounds * _column(KEY_STEPS, key.device) & LOW  # [ROUNDS, 2, N]
    multipliers = _column(MULTIPLIERS, key.device)
    even, odd = counter[::2], counter[1::2]
    for k in keys:
        product = (even * multipliers).flip(0)  # wraps to a negative number, with the right 64 bits
        even, odd = (product >> 32 & LOW) ^ odd ^ k, product & LOW
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def _column(values: tuple[int, int], device: torch.device) -> Tensor:
    """int64 [2, 1], filled on the device: copied from the host it could not be in a CUDA graph."""
    return torch.stack([torch.full((1,), value, dtype=torch.int64, device=device) for value in values])
