"""Which points each figure of the paper needs: the loads that its text names, and some around."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.paper.points import (
    DREAM_ARXIV,
    DREAM_SHAREGPT,
    LLADA_ARXIV,
    LLADA_SHAREGPT,
    PAIRS,
    Calibration,
    Pair,
    Point,
    Variant,
    colocated,
    disaggregated,
    hybrid,
)

COLOCATED, DISAGGREGATED, HYBRID = WAYS = (colocated(), disaggregated(), hybrid())
ONE_GPU = colocated(num_gpus=1)
BUDGETS = (512, 1024, 2048, 16384)
SPLITS = (4, 5, 6)
HYBRIDS = (hybrid(5, 1024), hybrid(5, 4096), hybrid(3, 1024), hybrid(3, 4096))

WAY_LOADS = {
    LLADA_SHAREGPT: (3.0, 6.0, 6.5, 7.0, 7.5, 8.0),
    LLADA_ARXIV: (3.0, 6.0, 7.0, 8.0, 8.5),
    DREAM_SHAREGPT: (3.0, 6.0, 7.0, 8.0, 8.5, 9.5),
    DREAM_ARXIV: (3.0, 7.0, 8.5, 9.5, 10.0, 11.0),
}
BUDGET_LOADS = {
    LLADA_SHAREGPT: (6.0, 6.5, 7.0, 7.5, 8.0),
    LLADA_ARXIV: (7.0, 8.0, 8.5),
    DREAM_SHAREGPT: (7.0, 8.5),
    DREAM_ARXIV: (7.0, 8.5),
}
HYBRID_LOADS = (6.0, 7.0, 7.5, 8.0)
ONE_GPU_LOADS = (0.3, 0.6, 0.8, 1.0, 1.1)
ALONE_LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6)
SPLIT_LOAD = 6.5
CDF_LOADS = {LLADA_SHAREGPT: 6.5, DREAM_ARXIV: 8.5}
BREAKDOWN_LOADS = {LLADA_SHAREGPT: 6.5, LLADA_ARXIV: 7.0, DREAM_SHAREGPT: 7.0, DREAM_ARXIV: 8.5}
"""Figure 11's lower row; the paper gives no loads. 6.5 suits its numbers, the others are near the knees."""

HEADLINES = ((LLADA_SHAREGPT, 7.5), (DREAM_ARXIV, 7.0), (DREAM_ARXIV, 9.5))
"""Where ways to serve are compared under other calibrations."""


def _curves(pair: Pair, variants: Iterable[Variant], loads: Iterable[float]) -> list[Point]:
    loads = tuple(loads)
    return [Point(pair, variant, load) for variant in variants for load in loads]


def _all_ways() -> list[Point]:
    return [point for pair in PAIRS for point in _curves(pair, WAYS, WAY_LOADS[pair])]


def _all_budgets() -> list[Point]:
    budgets = [colocated(tau) for tau in BUDGETS]
    return [point for pair in PAIRS for point in _curves(pair, budgets, BUDGET_LOADS[pair])]


POINTS: dict[int, tuple[Point, ...]] = {
    3: (),
    5: tuple(_curves(LLADA_SHAREGPT, map(disaggregated, SPLITS), [SPLIT_LOAD])),
    8: tuple(point for pair in (LLADA_SHAREGPT, LLADA_ARXIV) for point in _curves(pair, [ONE_GPU], ONE_GPU_LOADS)),
    9: tuple(_all_ways()),
    10: tuple(point for pair, load in CDF_LOADS.items() for point in _curves(pair, WAYS, [load])),
    11: tuple(_all_budgets()),
    12: tuple(_curves(LLADA_SHAREGPT, HYBRIDS, HYBRID_LOADS)),
}
"""Figure -> what is simulated for it; Figure 3 and one request at a time (Figure 8) are computed without."""


def sensitivity_points(calibration: Calibration) -> list[Point]:
    """The ways to serve under another calibration; without prefill workers nothing is handed over."""
    return [
        Point(pair, way, load, "as fitted" if calibration == "no hand-over cost" and way == COLOCATED else calibration)
        for pair, load in HEADLINES
        for way in WAYS
    ]
