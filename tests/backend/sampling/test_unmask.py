"""The rules against the plainest way to write them, ties and rows without a choice included."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from backend.sampling.unmask import by_factor, by_quota, by_threshold

Row = list[float]

# Few values, so that there are ties; -inf is no candidate, inf a broken row that has to come first.
SCORES = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0, -math.inf, math.inf]), st.floats(-5, 1, width=32))
BATCHES = st.integers(1, 12).flatmap(
    lambda length: st.lists(
        st.lists(SCORES, min_size=length, max_size=length).filter(lambda row: max(row) > -math.inf),
        min_size=1,
        max_size=5,
    )
)


def ranking(row: Row) -> list[int]:
    """Candidates from the best to the worst; among equals the leftmost first."""
    return sorted((i for i, score in enumerate(row) if score > -math.inf), key=lambda i: (-row[i], i))


def array(batch: list[Row]) -> NDArray[np.float32]:
    return np.array(batch, dtype=np.float32)


def places(chosen: NDArray[np.bool_]) -> list[set[int]]:
    return [set(np.flatnonzero(row).tolist()) for row in chosen]


@given(BATCHES, st.data())
def test_threshold(batch: list[Row], data: st.DataObject) -> None:
    limits = data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 2.0]), min_size=len(batch), max_size=len(batch)))
    expected = [
        {i for i in ranking(row) if row[i] >= limit} | {ranking(row)[0]}
        for row, limit in zip(array(batch).tolist(), limits, strict=True)
    ]
    assert places(by_threshold(array(batch), np.array(limits, dtype=np.float32))) == expected


@given(BATCHES, st.data())
def test_factor(batch: list[Row], data: st.DataObject) -> None:
    factors = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=len(batch), max_size=len(batch)))
    expected = []
    for row, factor in zip(array(batch).tolist(), factors, strict=True):
        taken: set[int] = set()
        for n, position in enumerate(ranking(row), start=1):
            if n > 1 and row[position] < 1 - factor / (n + 1):
                break
            taken.add(position)
        expected.append(taken)
    assert places(by_factor(array(batch), np.array(factors))) == expected


@given(BATCHES, st.data())
def test_quota(batch: list[Row], data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 15), min_size=len(batch), max_size=len(batch)))
    expected = [set(ranking(row)[:count]) for row, count in zip(array(batch).tolist(), counts, strict=True)]
    assert places(by_quota(array(batch), np.array(counts))) == expected


def test_the_last_candidate_that_fails_is_left_by_the_factor() -> None:
    """The reference code takes it: one candidate too many whenever it is the last one that fails."""
    score = array([[0.9, 0.1], [0.9, 0.7]])
    assert places(by_factor(score, np.array([1.0, 1.0]))) == [{0}, {0, 1}]


def test_one_left_is_taken_by_every_rule() -> None:
    score = array([[-math.inf, -4.0, -math.inf]])
    assert places(by_threshold(score, np.array([2.0], dtype=np.float32))) == [{1}]
    assert places(by_factor(score, np.array([0.0]))) == [{1}]
    assert places(by_quota(score, np.array([3]))) == [{1}]
