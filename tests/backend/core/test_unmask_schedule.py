import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.core.unmask_schedule import even, random_picks, timesteps
from backend.sampling.sampler import SamplingBatch

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
def test_timesteps_are_dreams_own(block: tuple[int, int]) -> None:
    """As `_sample` in Dream's generation_utils.py counts: done after exactly so many steps."""
    length, steps = block
    times = torch.linspace(1, 1e-3, steps + 1)
    left = length
    for step in range(steps):
        theirs = int(torch.tensor(left) * (1 - times[step + 1] / times[step])) if step < steps - 1 else left
        assert timesteps(left, steps, step) == theirs
        left -= theirs
    assert left == 0
    assert timesteps(3, steps, steps + 5) == 3


def test_timesteps_as_the_reference_code_committed_them() -> None:
    """Fast-dLLM's Dream: the prefill commits the first of 16 tokens, 7 cached calls the others."""
    left, counts = 15, []
    for step in range(1, 8):
        counts.append(timesteps(left, 8, step))
        left -= counts[-1]
    assert counts == [2, 2, 2, 2, 2, 2, 3]


@given(BLOCKS, st.integers(-(2**63), 2**63 - 1), st.data())
def test_random_picks_are_the_sampler_s(block: tuple[int, int], seed: int, data: st.DataObject) -> None:
    length, steps = block
    params = SamplingParams(length, length, length, unmasking="random", steps_per_block=steps, seed=seed)
    request = Request("a", [1], params, 0.0)
    request.commit([(o, 7) for o in data.draw(st.sets(st.integers(0, length - 1), max_size=length - 1))])
    masked = np.array([o for o, token in enumerate(request.block.tokens) if token is None])
    logits = torch.randn(len(masked), 9, generator=torch.Generator().manual_seed(0))
    choice = SamplingBatch([request], length, torch.device("cpu")).choose(logits, 8, masked)
    assert choice.places.tolist() == random_picks(request.block, params)
