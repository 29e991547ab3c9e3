import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.sampling.schedule import even, timesteps

BLOCKS = st.integers(1, 256).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(BLOCKS)
def test_even_shares_fill_a_block_in_exactly_its_steps(block: tuple[int, int]) -> None:
    length, steps = block
    counts = [even(length, steps, step) for step in range(steps)]
    assert sum(counts) == length
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1
    assert even(length, steps, steps + 5) >= 1


@given(BLOCKS)
def test_timesteps_are_dreams_own_but_never_0(block: tuple[int, int]) -> None:
    """As `_sample` in Dream's generation_utils.py counts, and done after so many steps at most."""
    length, steps = block
    times = torch.linspace(1, 1e-3, steps + 1)
    left = length
    for step in range(steps):
        if not left:
            break  # the steps that took more than nothing have finished it early
        theirs = int(torch.tensor(left) * (1 - times[step + 1] / times[step])) if step < steps - 1 else left
        assert timesteps(left, steps, step) == max(theirs, 1)
        left -= timesteps(left, steps, step)
    assert left == 0
    assert timesteps(3, steps, steps + 5) == 3


def test_timesteps_as_the_reference_code_committed_them() -> None:
    """Fast-dLLM's Dream: the prefill commits the first of 16 tokens, 7 cached calls the others."""
    left, counts = 15, []
    for step in range(1, 8):
        counts.append(timesteps(left, 8, step))
        left -= counts[-1]
    assert counts == [2, 2, 2, 2, 2, 2, 3]
    assert isinstance(counts[0], int) and not isinstance(counts[0], np.integer)
