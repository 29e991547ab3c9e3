from __future__ import annotations

import math

import pytest

from benchmarks.metrics import Distribution, Objective, Outcome, summarize


def outcome(index: int = 0, intended_s: float = 0.0, latency_s: float = 1.0, **more: object) -> Outcome:
    fields = {"task": "add", "sent_s": intended_s, "num_tokens": 10, "num_prompt_tokens": 7} | more
    return Outcome(index=index, intended_s=intended_s, finished_s=intended_s + latency_s, **fields)  # type: ignore[arg-type]


def test_percentiles_are_interpolated() -> None:
    found = Distribution.of(float(value) for value in range(1, 102))
    assert (found.mean, found.p50, found.p90, found.p99, found.max) == (51.0, 51.0, 91.0, 100.0, 101.0)
    assert Distribution.of([1.0, 2.0]).p50 == 1.5


def test_of_nothing_there_are_no_percentiles() -> None:
    assert all(math.isnan(value) for value in vars(Distribution.of([])).values())


def test_latency_counts_from_when_a_request_was_due() -> None:
    late = outcome(intended_s=1.0, sent_s=4.0, latency_s=5.0, first_token_s=4.5)
    assert late.latency_s == 5.0
    assert late.first_token_latency_s == 3.5


def test_figures_of_a_run() -> None:
    outcomes = [
        outcome(0, 0.0, 1.0, is_correct=True, first_token_s=0.5, commit_gaps_s=(0.1, 0.2)),
        outcome(1, 2.0, 3.0, is_correct=False, first_token_s=2.5),
        outcome(2, 4.0, 2.0, task="spell"),
        outcome(3, 5.0, 0.1, error="HTTP 429", num_tokens=10),
    ]
    summary = summarize(outcomes, 8.0, Objective(2.0))
    assert (summary.num_requests, summary.num_completed, summary.errors) == (4, 3, {"HTTP 429": 1})
    assert summary.achieved_rate == 0.5
    assert summary.completed_rate == 3 / 6
    assert summary.tokens_per_s == 30 / 6, "a failed request's tokens reached nobody"
    assert summary.goodput == 2 / 8
    assert summary.latency.max == 3.0, "a quick error is no quick answer"
    assert summary.commit_gap.max == 0.2
    assert summary.correct == {"add": (1, 2)}


def test_an_objective_may_bound_the_first_tokens() -> None:
    objective = Objective(2.0, first_token_s=0.4)
    assert objective.is_met(outcome(first_token_s=0.3))
    assert not objective.is_met(outcome(first_token_s=0.5))
    assert not objective.is_met(outcome())
    assert not objective.is_met(outcome(first_token_s=0.3, error="timeout"))


def test_a_run_without_requests_has_figures_too() -> None:
    summary = summarize([], 10.0, Objective(1.0))
    assert (summary.achieved_rate, summary.completed_rate, summary.goodput) == (0.0, 0.0, 0.0)
    assert summary.latency.mean != pytest.approx(0.0)
