"""Results of a sweep that nobody ran."""

from __future__ import annotations

from benchmarks.metrics import Distribution, Summary
from benchmarks.points import Measured, Point
from benchmarks.scrape import Breakdown


def measured(
    variant: str, rate: float, mean: float, seed: int = 1, repeat: int = 0, num_differing: int = 0, errors: int = 0
) -> Measured:
    """One run with this mean latency, and a p99 of three times that."""
    latency = Distribution(mean, mean, 2 * mean, 3 * mean, 4 * mean)
    summary = Summary(
        num_requests=100,
        num_completed=100 - errors,
        errors={"HTTP 429": errors} if errors else {},
        duration_s=10.0,
        achieved_rate=rate * 1.01,
        completed_rate=rate * 0.99,
        tokens_per_s=50.0,
        mean_prompt_tokens=200.0,
        mean_tokens=60.0,
        goodput=rate / 2,
        latency=latency,
        first_token=latency,
        commit_gap=latency,
        lateness=Distribution(),
        correct={"add": (3, 4), "spell": (5, 6)},
    )
    breakdown = Breakdown({"prefill": mean / 4, "decode": mean / 2}, False, {"sangam_router_overflows_total": 7.0})
    return Measured(
        Point(variant, rate, seed, repeat), summary, breakdown, {"router": 0.125, "others": 0.5}, num_differing
    )


SWEEP = [
    measured("hybrid", 4.0, 0.2, seed=1),
    measured("colocated", 4.0, 0.3, errors=2, num_differing=1),
    measured("colocated", 2.0, 0.1),
    measured("hybrid", 2.0, 0.1),
    measured("hybrid", 4.0, 0.4, seed=2),
]
