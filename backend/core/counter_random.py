"""Counter-based randomness: a number depends on (seed, block, step, position) and on nothing else.

`backend/sampling/seeds.py` makes the same numbers for whole batches.
"""

from __future__ import annotations

ORDER = 1
"""Stream of the numbers by which `unmasking: random` orders positions; tokens are drawn by stream 0."""

# SplitMix64's finalizer (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_BITS = (1 << 64) - 1


def uniform(seed: int, block: int, step: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1).

    Args:
        stream: which of several independent numbers for the same counters.
    """
    state = seed & _BITS
    for counter in (block, step, position + (stream << 32)):
        state = _mix((state + GAMMA * (counter + 1)) & _BITS)
    return (state >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * MIX_1) & _BITS
    x = ((x ^ (x >> 27)) * MIX_2) & _BITS
    return x ^ (x >> 31)
