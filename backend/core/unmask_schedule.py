"""How many positions a step commits, and which ones if their order is random: known before its forward."""

from __future__ import annotations

import struct
from functools import lru_cache

from backend.core.block import Block
from backend.core.counter_random import ORDER, uniform
from backend.core.sampling_params import SamplingParams


def num_to_commit(block: Block, params: SamplingParams) -> int:
    """Positions that the quota rules commit in the block's current step."""
    if params.quota_schedule == "even":
        return even(block.length, params.steps_per_block, block.step)
    return timesteps(block.num_masked, params.steps_per_block, block.step)


def least_to_commit(block: Block, params: SamplingParams) -> int:
    """Positions that the block's current step commits whatever the model says, while so many are masked."""
    by_quota = params.unmasking not in ("threshold", "paced_threshold", "factor")
    return num_to_commit(block, params) if by_quota else 1


def even(block_length: int, steps_per_block: int, step: int) -> int:
    """Positions to commit in `step` so that the block takes `steps_per_block`; at least one.

    The remainder goes to the earliest steps (LLaDA's `get_num_transfer_tokens`).
    """
    base, remainder = divmod(block_length, steps_per_block)
    return max(base + (step < remainder), 1)


def timesteps(num_masked: int, steps_per_block: int, step: int) -> int:
    """Positions to commit of the `num_masked` left, by Dream's timesteps: int(n * (1 - s / t)), in float32.

    Can be 0: the first of as many steps as there are positions commits nothing. The last step takes all.
    """
    if step >= steps_per_block - 1:
        return num_masked
    return int(_float32(num_masked * shares(steps_per_block)[step]))


@lru_cache(maxsize=256)
def shares(num_steps: int) -> list[float]:
    """1 - s / t of each step, t going from 1 to 0.001, rounded as torch.linspace does with fused multiply-add."""
    end = _float32(1e-3)
    size = _float32(_float32(end - 1.0) / num_steps)
    half = (num_steps + 1) // 2
    times = [_float32(1.0 + size * i if i < half else end - size * (num_steps - i)) for i in range(num_steps + 1)]
    return [_float32(1.0 - _float32(s / t)) for t, s in zip(times, times[1:], strict=False)]


def random_picks(block: Block, params: SamplingParams) -> list[int]:
    """The offsets that `unmasking: random` commits in the block's current step, ascending; the best if it is none."""
    masked = [offset for offset, token in enumerate(block.tokens) if token is None]
    scores = {
        offset: _float32(uniform(params.seed, block.index, block.step, offset, stream=ORDER)) for offset in masked
    }
    masked.sort(key=lambda offset: -scores[offset])
    return sorted(masked[: max(num_to_commit(block, params), 1)])


def _float32(x: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    return rounded
