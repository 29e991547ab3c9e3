"""Who wins where: what the paper says in words, as a question to the simulations of one seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.paper.figures import (
    BUDGETS,
    COLOCATED,
    DISAGGREGATED,
    HYBRID,
    WAY_LOADS,
    WAYS,
)
from benchmarks.paper.knee import load_at
from benchmarks.paper.points import (
    DREAM_ARXIV,
    DREAM_SHAREGPT,
    LLADA_ARXIV,
    LLADA_SHAREGPT,
    PAIRS,
    Calibration,
    Pair,
    Variant,
    colocated,
    disaggregated,
)
from benchmarks.paper.quantities import Measure, Seeded

TIE = 0.02
"""Latencies within this of each other are as good as equal, where the paper says "matches" or "at most"."""
LOW_LOAD_TIE = 0.15
SATURATED = 3.0
HIGH_LOADS = {LLADA_SHAREGPT: 7.5, LLADA_ARXIV: 8.0, DREAM_SHAREGPT: 8.5, DREAM_ARXIV: 8.5}
MEAN, P50, P99 = "latency mean", "latency p50", "latency p99"
QUANTILES = ("p50", "p90", "p99")


@dataclass(frozen=True)
class Ordering:
    """Attributes:
    says: what is asked, as tested.
    holds: for one seed. Raises NotRun.
    """

    says: str
    holds: Callable[[Seeded], bool]


def _values(seeded: Seeded, pair: Pair, variants: Sequence[Variant], load: float, metric: str) -> list[float]:
    return [Measure(pair, variant, load, metric)(seeded) for variant in variants]


def _ascending(pair: Pair, variants: Sequence[Variant], load: float, metric: str) -> Callable[[Seeded], bool]:
    def holds(seeded: Seeded) -> bool:
        values = _values(seeded, pair, variants, load, metric)
        return values == sorted(set(values))

    return holds


def _lowest(pair: Pair, tau: int, load: float) -> Ordering:
    variants = [colocated(tau), *(colocated(budget) for budget in BUDGETS if budget != tau)]

    def holds(seeded: Seeded) -> bool:
        first, *others = _values(seeded, pair, variants, load, P99)
        return first < min(others)

    return Ordering(f"τ={tau} has the lowest p99 of the four at {load:g}", holds)


def saturation(seeded: Seeded, pair: Pair, way: Variant) -> float:
    """The load at which a way's mean is `SATURATED` times that of colocated at the lowest load. Raises NotRun.

    One latency for all ways: by their own low loads, the way that is slowest there would seem to last longest. Loads
    are those that the arrivals of the seed really were.
    """
    loads, part = WAY_LOADS[pair], seeded.achieved(pair)
    lowest = Measure(pair, COLOCATED, loads[0], MEAN)(seeded)
    return part * load_at(seeded.curve(pair, way, loads, MEAN), SATURATED * lowest)


def first_to_saturate(seeded: Seeded, pair: Pair) -> bool:
    """Whether the disaggregated one is."""
    first, *others = (saturation(seeded, pair, way) for way in (DISAGGREGATED, COLOCATED, HYBRID))
    return first < min(others)


def colocated_is_lowest(seeded: Seeded, pair: Pair) -> bool:
    return _is_lowest(seeded, pair, MEAN) and _is_lowest(seeded, pair, P99)


def _is_lowest(seeded: Seeded, pair: Pair, metric: str) -> bool:
    first, *others = _values(seeded, pair, WAYS, HIGH_LOADS[pair], metric)
    return first < min(others)


def _tied_at_low_load(seeded: Seeded) -> bool:
    rows = [_values(seeded, pair, WAYS, WAY_LOADS[pair][0], MEAN) for pair in PAIRS]
    return all(max(row) <= (1 + LOW_LOAD_TIE) * min(row) for row in rows)


def _dream_arxiv(seeded: Seeded) -> bool:
    rows = [_values(seeded, DREAM_ARXIV, WAYS, load, metric) for load in (7.0, 8.5) for metric in (MEAN, P99)]
    is_before = all(hybrid <= (1 + TIE) * split and split < together for together, split, hybrid in rows)
    together, split, _ = _values(seeded, DREAM_ARXIV, WAYS, 9.5, MEAN)
    return is_before and split > together


def _hybrid_matches(seeded: Seeded) -> bool:
    return all(
        (1 + TIE) * row[1] >= row[2]
        for pair in PAIRS
        for row in [_values(seeded, pair, WAYS, load, MEAN) for load in WAY_LOADS[pair]]
    )


def _budgets_on_sharegpt(seeded: Seeded) -> bool:
    for load in (6.5, 7.0, 7.5):
        p512, p1024, p2048, p16384 = _values(seeded, LLADA_SHAREGPT, [colocated(t) for t in BUDGETS], load, P99)
        if not (p1024 < p2048 < min(p512, p16384)):
            return False
    return p512 > max(p1024, p2048, p16384)


def _budgets_on_arxiv(seeded: Seeded) -> bool:
    early, late = (_values(seeded, LLADA_ARXIV, [colocated(t) for t in BUDGETS], load, P99) for load in (7.0, 8.0))
    return all(row[0] == max(row) for row in (early, late)) and late[3] == min(late)


def _lowest_queue(seeded: Seeded) -> bool:
    rows = [_values(seeded, LLADA_SHAREGPT, WAYS, 6.5, f"prefill_queue {quantile}") for quantile in QUANTILES]
    return all(row[0] == min(row) for row in rows)


ORDERINGS: dict[str, Ordering] = {
    "C099": _lowest(LLADA_SHAREGPT, 1024, 6.0),
    "C100": _lowest(LLADA_SHAREGPT, 1024, 7.5),
    "C101": _lowest(DREAM_SHAREGPT, 1024, 7.0),
    "C102": _lowest(DREAM_SHAREGPT, 1024, 8.5),
    "C146": Ordering(
        "at 7.5, mean: colocated < hybrid < disaggregated",
        _ascending(LLADA_SHAREGPT, (COLOCATED, HYBRID, DISAGGREGATED), 7.5, MEAN),
    ),
    "C147": Ordering(f"at the lowest load, means within {LOW_LOAD_TIE:.0%} in all pairs", _tied_at_low_load),
    "C148": Ordering(
        "mean and p99, at 7 and 8.5: hybrid ≤ disaggregated < colocated; mean at 9.5 reversed", _dream_arxiv
    ),
    "C149": Ordering("prefill queue at 6.5: colocated lowest at p50, p90 and p99", _lowest_queue),
    "C150": Ordering(
        "p99 of the prefill queue at 8.5: hybrid < disaggregated < colocated",
        _ascending(DREAM_ARXIV, (HYBRID, DISAGGREGATED, COLOCATED), 8.5, "prefill_queue p99"),
    ),
    "C151": Ordering(f"mean: hybrid at most {TIE:.0%} over disaggregated at every load of every pair", _hybrid_matches),
    "C152": Ordering("p99 at 6.5, 7 and 7.5: τ 1024 < 2048 < the others; at 7.5 512 highest", _budgets_on_sharegpt),
    "C153": Ordering(
        "p50 at 6.5: τ 16384 < 1024", _ascending(LLADA_SHAREGPT, (colocated(16384), colocated(1024)), 6.5, P50)
    ),
    "C154": Ordering("p99: τ 512 highest at 7 and 8, 16384 lowest at 8", _budgets_on_arxiv),
    "C155": Ordering(
        "p50 at 6.5: 5P3D < 6P2D < 4P4D",
        _ascending(LLADA_SHAREGPT, (disaggregated(5), disaggregated(6), disaggregated(4)), 6.5, P50),
    ),
}

# Parts of the above, and orderings that the paper's numbers imply: each alone says more than a conjunction that fails.
_FURTHER: tuple[tuple[str, Pair, tuple[Variant, ...], float, str], ...] = (
    ("mean", LLADA_SHAREGPT, (HYBRID, DISAGGREGATED), 7.5, MEAN),
    ("mean", LLADA_SHAREGPT, (COLOCATED, HYBRID), 7.5, MEAN),
    ("p99 of the prefill queue", LLADA_SHAREGPT, (HYBRID, DISAGGREGATED), 6.5, "prefill_queue p99"),
    ("p99 of decode time", LLADA_SHAREGPT, (DISAGGREGATED, HYBRID), 6.5, "decode p99"),
    ("mean", DREAM_ARXIV, (HYBRID, DISAGGREGATED, COLOCATED), 7.0, MEAN),
    ("mean", DREAM_ARXIV, (COLOCATED, DISAGGREGATED), 9.5, MEAN),
    ("p99 of decode time", DREAM_ARXIV, (DISAGGREGATED, HYBRID, COLOCATED), 8.5, "decode p99"),
    ("p99", LLADA_SHAREGPT, (colocated(1024), colocated(512)), 7.5, P99),
)
FURTHER = (
    *(
        Ordering(
            f"{pair.label}, {name} at {load:g}: {' < '.join(v.label for v in variants)}",
            _ascending(pair, variants, load, metric),
        )
        for name, pair, variants, load, metric in _FURTHER
    ),
    *(
        Ordering(f"{pair.label}: disaggregated is the first to saturate", partial(first_to_saturate, pair=pair))
        for pair in PAIRS
    ),
    *(
        Ordering(
            f"{pair.label}, {metric.split()[1]} at {HIGH_LOADS[pair]:g}: colocated is lowest",
            partial(_is_lowest, pair=pair, metric=metric),
        )
        for pair in PAIRS[:3]
        for metric in (MEAN, P99)
    ),
)


def under(calibration: Calibration, pair: Pair, load: float) -> Callable[[Seeded], list[float]]:
    """Mean latencies of `WAYS` under another calibration, in seconds."""

    def means(seeded: Seeded) -> list[float]:
        return [Measure(pair, way, load, MEAN, _applied(calibration, way))(seeded) for way in WAYS]

    return means


def _applied(calibration: Calibration, way: Variant) -> Calibration:
    return "as fitted" if calibration == "no hand-over cost" and not way.num_prefill else calibration
