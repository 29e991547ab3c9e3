from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.core import counter_random
from backend.core.counter_random import ORDER
from backend.core.sampling_params import MAX_SEED
from backend.sampling.seeds import philox, uniform
from tests.backend.core.test_counter_random import KNOWN_ANSWERS, Words

COUNTERS = st.tuples(
    st.integers(-MAX_SEED - 1, MAX_SEED), st.integers(0, 2**31 - 1), st.integers(0, 768), st.integers(0, 255)
)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter: Words, key: tuple[int, int], result: Words) -> None:
    words = philox(torch.tensor(counter)[:, None], torch.tensor(key)[:, None])
    assert tuple(words[:, 0].tolist()) == result


@given(st.lists(COUNTERS, min_size=1, max_size=9), st.sampled_from([0, ORDER]))
def test_numbers_are_the_core_s(counters: list[tuple[int, int, int, int]], stream: int) -> None:
    columns = [torch.tensor(column) for column in zip(*counters, strict=True)]
    expected = [counter_random.uniform(*counter, stream=stream) for counter in counters]
    assert uniform(columns[0], columns[1], columns[2], columns[3], stream=stream).tolist() == expected
