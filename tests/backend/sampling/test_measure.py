from __future__ import annotations

import math

import torch

from backend.sampling.measure import margin, negative_entropy

PROBABILITIES = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, 1.0, 0.0, 0.0], [0.25] * 4], dtype=torch.float64)


def test_entropy_counts_what_is_impossible_as_nothing() -> None:
    expected = torch.tensor([-1.5 * math.log(2), 0.0, -math.log(4)], dtype=torch.float64)
    torch.testing.assert_close(negative_entropy(PROBABILITIES), expected)


def test_margin_is_the_lead_over_the_second() -> None:
    assert margin(PROBABILITIES).tolist() == [0.25, 1.0, 0.0]


def test_broken_rows_are_nan() -> None:
    broken = torch.tensor([[torch.nan, 0.5]])
    assert negative_entropy(broken).isnan() and margin(broken).isnan()
