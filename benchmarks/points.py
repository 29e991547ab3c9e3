"""A sweep as plain data: which points are measured, in which order, and what came out of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.metrics import Summary
from benchmarks.scrape import Breakdown


@dataclass(frozen=True)
class Point:
    """One run: a variant under one load.

    Attributes:
        rate: offered load, requests per second.
        seed: of questions and arrivals, the same for all variants.
        repeat: counts runs of the same point, which differ by the machine's noise alone.
    """

    variant: str
    rate: float
    seed: int
    repeat: int = 0


@dataclass(frozen=True)
class Measured:
    """What one run gave.

    Attributes:
        cores: processors used on average, by kind of process; the load generator is "client", what has nothing to
            do with the sweep "others".
        num_differing: answers that are not those of the first variant to the same questions.
    """

    point: Point
    summary: Summary
    breakdown: Breakdown = field(default_factory=Breakdown)
    cores: Mapping[str, float] = field(default_factory=dict)
    num_differing: int = 0


def order(variants: Sequence[str], rates: Sequence[float], seeds: Sequence[int], repeats: int = 1) -> list[Point]:
    """All points. Variants take turns at every load, and each time another one begins.

    So a machine that is slower for a while is slower for all of them alike.
    """
    rounds = itertools.product(range(repeats), seeds, rates)
    points = []
    for turn, (repeat, seed, rate) in enumerate(rounds):
        first = turn % len(variants)
        names = [*variants[first:], *variants[:first]]
        points += [Point(name, rate, seed, repeat) for name in names]
    return points


def noise(results: Iterable[Measured]) -> float | None:
    """The most that the mean latency of one point spread over its repeats, relative to their mean.

    None if no point was repeated.
    """
    repeated: dict[tuple[str, float, int], list[float]] = {}
    for result in results:
        point = result.point
        repeated.setdefault((point.variant, point.rate, point.seed), []).append(result.summary.latency.mean)
    spreads = [(max(m) - min(m)) / (sum(m) / len(m)) for m in repeated.values() if len(m) > 1]
    return max(spreads) if spreads else None
