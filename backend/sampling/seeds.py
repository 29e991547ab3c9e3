"""Counter-based randomness: a draw depends on (seed, block, step, position) and on nothing else."""

from __future__ import annotations

from torch import Tensor

Counters = tuple[Tensor, Tensor, Tensor, Tensor]
"""(seed, block, step, position)."""

ORDER = 1
"""Stream of the numbers by which `unmasking: random` orders positions; tokens are drawn by stream 0."""

# SplitMix64's finalizer (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014),
# written as signed 64-bit constants because torch has no unsigned arithmetic.
_GAMMA = -0x61C8864680B583EB
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seed: Tensor, block: Tensor, step: Tensor, position: Tensor, stream: int = 0) -> Tensor:
    """Numbers in [0, 1), float64 [N], from int64 counters [N] each.

    Args:
        stream: which of several independent numbers for the same counters.
    """
    state = seed
    for counter in (block, step, position + (stream << 32)):
        state = _mix(state + _GAMMA * (counter + 1))
    return _shift_right(state, 11).double() * 2.0**-53
