"""Counter-based randomness: a number depends on (seed, block, step, position) and on nothing else.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, 2011; Random123).
`backend/sampling/seeds.py` and the kernels of `backend/sampling/triton_unmask.py` make the same numbers.
"""

from __future__ import annotations

ORDER = 1
"""Stream of the numbers by which `unmasking: random` orders positions; tokens are drawn by stream 0."""

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW = (1 << 32) - 1

_Words = tuple[int, int, int, int]


def uniform(seed: int, block: int, step: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1), of 53 bits.

    Args:
        seed: its low 64 bits count; of the others the low 32.
        stream: which of several independent numbers for the same counters.
    """
    words = philox((block & LOW, step & LOW, position & LOW, stream & LOW), (seed & LOW, seed >> 32 & LOW))
    return ((words[0] << 32 | words[1]) >> 11) * 2.0**-53


def philox(counter: _Words, key: tuple[int, int]) -> _Words:
    """Four words of 32 random bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = second >> 32 ^ c1 ^ k0, second & LOW, first >> 32 ^ c3 ^ k1, first & LOW
        k0, k1 = k0 + KEY_STEPS[0] & LOW, k1 + KEY_STEPS[1] & LOW
    return c0, c1, c2, c3
