import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backend.sampling.unmask import by_quota, by_threshold, quota

CONFIDENCE = np.array([[0.2, -1.0, 0.95, 0.9], [0.3, 0.3, -1.0, 0.1]], dtype=np.float32)


def test_threshold_takes_all_that_reach_it_and_always_the_best() -> None:
    chosen = by_threshold(CONFIDENCE, np.array([0.9, 0.9], dtype=np.float32))
    assert chosen.tolist() == [[False, False, True, True], [True, False, False, False]]


def test_quota_takes_the_best_and_never_more_than_there_are() -> None:
    chosen = by_quota(CONFIDENCE, np.array([2, 9]))
    assert chosen.tolist() == [[False, False, True, True], [True, True, False, True]]
    assert by_quota(CONFIDENCE, np.array([1, 1])).tolist() == [[False, False, True, False], [True, False, False, False]]


@given(st.integers(1, 256).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_quotas_fill_a_block_in_exactly_its_steps(block: tuple[int, int]) -> None:
    length, steps = block
    counts = [quota(length, steps, step) for step in range(steps)]
    assert sum(counts) == length
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1
    assert quota(length, steps, steps + 5) >= 1
