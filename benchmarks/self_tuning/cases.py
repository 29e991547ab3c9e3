"""What is compared: "auto" with fixed values of the same setting, on the same seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.paper.points import DREAM_ARXIV, DREAM_SHAREGPT, LLADA_ARXIV, LLADA_SHAREGPT, Pair, workload
from benchmarks.simulator.config import calibrated
from benchmarks.simulator.runs import Run

AUTO = "auto"
FIRST_SEED = 101
TOKEN_BUDGETS = (512, 1024, 2048, 4096, 16384)
OVERFLOW_THRESHOLDS = (4096, 8192, 16384, 32768)

KNEES: Mapping[Pair, float] = {LLADA_SHAREGPT: 7.06, LLADA_ARXIV: 8.0, DREAM_SHAREGPT: 8.75, DREAM_ARXIV: 9.81}
"""Requests/s at which colocated with tau 1024 has 3 times its mean at low load, by `benchmarks.paper`."""

LOADS: Mapping[Pair, tuple[float, ...]] = {
    LLADA_SHAREGPT: (7.0, 8.0, 8.5),
    LLADA_ARXIV: (8.0, 8.5, 9.5),
    DREAM_SHAREGPT: (8.5, 9.5, 10.5),
    DREAM_ARXIV: (9.5, 11.0, 11.5),
}
"""The knee, the end of the sweep in `benchmarks.paper.figures`, and one beyond."""


@dataclass(frozen=True)
class Case:
    """One row: a pair at a load, of 8 workers so many for prefills alone."""

    pair: Pair
    load: float
    num_prefill: int = 0

    @property
    def is_past_knee(self) -> bool:
        return self.load > KNEES[self.pair]

    @property
    def name(self) -> str:
        split = f", {self.num_prefill}P{8 - self.num_prefill}C" if self.num_prefill else ""
        return f"{self.pair.label}{split} at {self.load:g}"

    def run(self, settings: Mapping[str, Any], seed: int, num_requests: int) -> Run:
        pair = self.pair
        config = calibrated(
            pair.model, pair.trace, num_prefill=self.num_prefill, num_colocated=8 - self.num_prefill, **settings
        )
        return Run(config, workload(pair, self.load, num_requests, seed))


@dataclass(frozen=True)
class Comparison:
    """A setting's fixed values and auto, over cases.

    Attributes:
        also: further settings, by name.
    """

    setting: str
    symbol: str
    fixed: tuple[int, ...]
    cases: tuple[Case, ...]
    num_seeds: int
    also: Mapping[int | str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def values(self) -> tuple[int | str, ...]:
        return (*self.fixed, AUTO, *self.also)

    def settings(self, value: int | str) -> Mapping[str, Any]:
        return self.also[value] if value in self.also else {self.setting: value}


LOW_LOADS: Mapping[Pair, float] = {LLADA_SHAREGPT: 6.0, LLADA_ARXIV: 6.0, DREAM_SHAREGPT: 6.0, DREAM_ARXIV: 7.0}

BOTH = "auto, τ auto"

COMPARISONS = {
    "colocated": Comparison(
        "token_budget",
        "τ",
        TOKEN_BUDGETS,
        tuple(Case(pair, load) for pair, loads in LOADS.items() for load in loads),
        10,
    ),
    "low load": Comparison(
        "token_budget",
        "τ",
        (1024, 4096),
        (Case(LLADA_SHAREGPT, 3.0), *(Case(pair, load) for pair, load in LOW_LOADS.items())),
        3,
    ),
    "hybrid": Comparison(
        "overflow_threshold",
        "θ",
        OVERFLOW_THRESHOLDS,
        (
            *(Case(pair, load, 5) for pair, loads in LOADS.items() for load in loads[:2]),
            Case(LLADA_SHAREGPT, 7.0, 3),
            Case(LLADA_SHAREGPT, 8.0, 3),
        ),
        6,
        {BOTH: {"overflow_threshold": AUTO, "token_budget": AUTO}},
    ),
}
