from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.planner.slo import Bound, Missed, Slo
from benchmarks.simulator.flight import Trip


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("p99<20s", (Bound(99.0, 20.0),)),
        ("mean<5s", (Bound(None, 5.0),)),
        ("p50 < 2.5s", (Bound(50.0, 2.5),)),
        ("p99<20s,mean<6s", (Bound(99.0, 20.0), Bound(None, 6.0))),
        ("p99.9<800ms", (Bound(99.9, 0.8),)),
    ],
)
def test_bounds_are_read_and_written(text: str, bounds: tuple[Bound, ...]) -> None:
    slo = Slo.parse(text)
    assert slo.bounds == bounds
    assert Slo.parse(str(slo)) == slo


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no bound"),
        ("p99", "no bound"),
        ("p99<20", "no bound"),
        ("p99>20s", "no bound"),
        ("median<2s", "'median<2s' is no bound"),
        ("p99<20s,", "no bound"),
        ("p100<1s", "between 0 and 100"),
        ("p0<1s", "between 0 and 100"),
        ("mean<0s", "no time"),
        ("p99<2s,p99<3s", "twice"),
    ],
)
def test_what_is_no_objective_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Slo.parse(text)


def test_the_ratio_is_that_of_the_worst_bound() -> None:
    latencies = np.array([1.0, 2.0, 3.0, 4.0])
    assert Slo.parse("p50<5s,mean<10s").ratio(latencies) == pytest.approx(2.5 / 5)
    assert Slo.parse("p50<5s,mean<2s").ratio(latencies) == pytest.approx(2.5 / 2)


def given_up(slo: Slo, arrivals_s: list[float], latencies: list[float]) -> float | None:
    """When the watch gives up."""
    watch = slo.watch(arrivals_s)
    pairs = zip(arrivals_s, latencies, strict=True)
    for finished_s, due_s in sorted((due_s + latency_s, due_s) for due_s, latency_s in pairs):
        trip = Trip(0, "0", (), None, (), due_s=due_s, finished_s=finished_s)  # type: ignore[arg-type]
        try:
            watch(trip)
        except Missed:
            return finished_s
    return None


@pytest.mark.parametrize("text", ["p99<1s", "p50<1s", "p90.5<1s", "mean<1s", "p90<1s,mean<1s"])
def test_a_watch_gives_up_only_where_nothing_can_help(text: str) -> None:
    slo, rng = Slo.parse(text), random.Random(text)
    seen = set()
    for _ in range(400):
        scale = rng.choice([0.3, 0.5, 0.9, 1.1])
        latencies = [scale * rng.expovariate(1.0) for _ in range(rng.randint(1, 120))]
        arrivals = sorted(rng.uniform(0, 10) for _ in latencies)
        stopped_s = given_up(slo, arrivals, latencies)
        if stopped_s is not None:
            # At best, what is under way ends now and what has not come takes no time.
            ends = zip(arrivals, latencies, strict=True)
            best = [min(latency, max(stopped_s - due, 0.0)) for due, latency in ends]
            assert slo.ratio(np.array(best)) >= 1 - 1e-12
        seen.add(stopped_s is not None)
    assert seen == {False, True}


def test_a_watch_gives_up_early_by_what_is_under_way() -> None:
    at_once = [0.0] * 100
    assert given_up(Slo.parse("p90<1s"), at_once, [0.5, *[1.5] * 99]) == 1.5
    assert given_up(Slo.parse("mean<1s"), at_once, [2.0] * 49 + [3.0] * 51) == 3.0
    # One is answered in time just when eleven others, none of which has ended, are due for more than a second.
    arrivals = [0.0] * 11 + [float(n) for n in range(2, 91)]
    assert given_up(Slo.parse("p90<1s"), arrivals, [50.0] * 11 + [0.5] * 89) == 2.5


def test_a_watch_lets_a_run_that_meets_go_on() -> None:
    assert given_up(Slo.parse("p90<1s"), [0.0] * 100, [0.5] * 91 + [5.0] * 9) is None
