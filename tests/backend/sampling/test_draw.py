from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.core.counter_random import ORDER
from backend.sampling.draw import sample, tempered, token_probability, top_probability, truncated
from backend.sampling.seeds import Counters, uniform

LOGITS = torch.tensor([0.3, 2.0, -1.0, 2.0, 1.2, -torch.inf, 0.9, -3.0])
ALL = 2**31 - 1


def counters(n: int, seed: int = 1) -> Counters:
    zeros = torch.zeros(n, dtype=torch.int64)
    return torch.full((n,), seed), zeros, zeros, torch.arange(n)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_top_probability_is_the_softmax_of_the_arg_max() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [5.0, 5.0, -torch.inf]])
    torch.testing.assert_close(top_probability(logits), torch.tensor([0.66524, 0.5]), atol=1e-5, rtol=0)


def test_top_probability_of_broken_rows_is_nan() -> None:
    logits = torch.zeros(4, 5)
    logits[0, 1] = torch.nan
    logits[1, 2] = torch.inf
    logits[2] = -torch.inf
    assert top_probability(logits).isnan().tolist() == [True, True, True, False]


def test_uniform_depends_on_every_counter_and_only_on_them() -> None:
    base = [torch.tensor([i]) for i in (7, 3, 2, 9)]
    value = uniform(*base)
    assert torch.equal(value, uniform(*base))
    seen = {value.item(), uniform(*base, stream=ORDER).item()}
    for i in range(4):
        for delta in (1, 1 << 31, -5):
            changed = list(base)
            changed[i] = base[i] + delta
            seen.add(uniform(*changed).item())
    assert len(seen) == 14
    batch = [torch.cat((torch.tensor([1, 2]), x)) for x in base]
    assert uniform(*batch)[2] == value[0]


@pytest.mark.parametrize("stream", [0, ORDER])
def test_uniform_is_uniform(stream: int) -> None:
    values = uniform(*counters(200_000), stream=stream)
    assert 0 <= values.min() and values.max() < 1
    share = torch.histc(values.float(), 20, 0, 1) / len(values)
    assert (share - 0.05).abs().max() < 0.003


def test_the_probability_of_a_token_is_the_plain_one() -> None:
    probability = token_probability(LOGITS.expand(3, -1), torch.tensor([1, 4, 5]))
    torch.testing.assert_close(probability, LOGITS.softmax(0)[[1, 4, 5]])


def test_a_tiny_temperature_is_arg_max() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    for temperature in (1e-6, 1e-310):
        probabilities = tempered(logits, torch.full((64,), temperature, dtype=torch.float64))
        assert torch.equal(sample(probabilities, counters(64)), logits.argmax(-1))


def naive(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Token by token; equals by id."""
    highest = max(logits)
    weights = [math.exp((logit - highest) / temperature) for logit in logits]
    ranking = sorted(range(len(weights)), key=lambda i: (-weights[i], i))[:top_k]
    total = sum(weights[i] for i in ranking)
    kept: list[int] = []
    for i in ranking:
        if kept and (sum(weights[k] for k in kept) / total >= top_p and top_p < 1):
            break
        kept.append(i)
    kept = [i for i in kept if weights[i] >= min_p * weights[ranking[0]]]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(weights))]


# No share that a sum of these weights could hit by rounding alone.
SHAPES = st.tuples(
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([1, 2, 3, 5, 100, ALL]),
    st.sampled_from([0.0, 0.3127, 0.7391, 0.9513, 1.0]),
    st.sampled_from([0.0, 0.1173, 0.6211, 1.0]),
)


@given(st.lists(SHAPES, min_size=1, max_size=6), st.data())
def test_truncation_is_row_by_row_what_it_says(
    shapes: list[tuple[float, int, float, float]], data: st.DataObject
) -> None:
    values = st.sampled_from([0.0, 1.0, 2.0, 3.5, -2.0, -20.0])
    rows = data.draw(st.lists(st.lists(values, min_size=6, max_size=6), min_size=len(shapes), max_size=len(shapes)))
    temperature, top_k, top_p, min_p = zip(*shapes, strict=True)
    probabilities = tempered(torch.tensor(rows), doubles(*temperature))
    kept = truncated(probabilities, torch.tensor(top_k), doubles(*top_p), doubles(*min_p))
    expected = [naive(row, *shape) for row, shape in zip(rows, shapes, strict=True)]
    torch.testing.assert_close(kept, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)


def test_the_most_likely_token_always_stays() -> None:
    probabilities = tempered(LOGITS[None], doubles(1.0))
    for top_k, top_p, min_p in ((1, 1.0, 0.0), (ALL, 0.0, 0.0), (ALL, 1e-9, 0.0), (2, 0.3, 1.0)):
        kept = truncated(probabilities, torch.tensor([top_k]), doubles(top_p), doubles(min_p))
        assert kept[0, 1] == 1.0 and kept.sum() == 1.0, "of two equals the lower id"


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, ALL, 1.0, 0.0), (0.5, ALL, 1.0, 0.0), (1.5, 4, 1.0, 0.0), (1.0, ALL, 0.8, 0.0), (0.8, ALL, 1.0, 0.2),
     (1.3, 5, 0.9, 0.1)],
)  # fmt: skip
def test_draws_follow_the_exact_probabilities(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Pearson's chi-square over 20,000 seeds; 24.3 is the 0.1% point of 7 degrees of freedom."""
    n = 20_000
    exact = naive(LOGITS.tolist(), temperature, top_k, top_p, min_p)
    probabilities = tempered(LOGITS[None], doubles(temperature))
    probabilities = truncated(probabilities, torch.tensor([top_k]), doubles(top_p), doubles(min_p))
    zeros = torch.zeros(n, dtype=torch.int64)
    tokens = sample(probabilities.expand(n, -1).contiguous(), (torch.arange(n), zeros, zeros + 3, zeros + 5))
    counts = torch.bincount(tokens, minlength=8).tolist()
    assert all(count == 0 for count, share in zip(counts, exact, strict=True) if share == 0)
    expected = [n * share for share in exact]
    chi_square = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True) if e > 0)
    assert chi_square < 24.3
