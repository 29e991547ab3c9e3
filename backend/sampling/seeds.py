"""`backend.core.counter_random` for whole batches: a draw depends on (seed, block, step, position) alone."""

from __future__ import annotations

from torch import Tensor

from backend.core.counter_random import GAMMA, MIX_1, MIX_2

Counters = tuple[Tensor, Tensor, Tensor, Tensor]
"""(seed, block, step, position)."""

# The core's constants as signed 64-bit numbers, because torch has no unsigned arithmetic.
_GAMMA, _MIX_1, _MIX_2 = (constant - (1 << 64) for constant in (GAMMA, MIX_1, MIX_2))


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
