"""What the paper ran: models on traces, ways to serve them, loads; as simulations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from benchmarks.simulator.config import SimulatorConfig, calibrated
from benchmarks.simulator.result import Result
from benchmarks.simulator.runs import Run, run_many
from benchmarks.simulator.workload import Workload, draw

Calibration = Literal["as fitted", "no hand-over cost"]


@dataclass(frozen=True)
class Pair:
    """A model and a trace, by their names in the simulator."""

    model: str
    trace: str

    @property
    def label(self) -> str:
        model = {"llada-8b": "LLaDA-8B", "dream-7b": "Dream-7B"}[self.model]
        return f"{model}, {'ShareGPT' if self.trace == 'sharegpt' else 'arXiv'}"


LLADA_SHAREGPT = Pair("llada-8b", "sharegpt")
LLADA_ARXIV = Pair("llada-8b", "arxiv")
DREAM_SHAREGPT = Pair("dream-7b", "sharegpt")
DREAM_ARXIV = Pair("dream-7b", "arxiv")
PAIRS = (LLADA_SHAREGPT, LLADA_ARXIV, DREAM_SHAREGPT, DREAM_ARXIV)


@dataclass(frozen=True)
class Variant:
    """A way to serve; colocated without prefill workers, disaggregated with an infinite theta."""

    num_prefill: int
    num_colocated: int
    tau: int = 1024
    theta: float = 8192

    @property
    def label(self) -> str:
        if not self.num_prefill:
            return f"colocated τ={self.tau}"
        if math.isinf(self.theta):
            return f"disaggregated {self.num_prefill}P{self.num_colocated}D"
        return f"hybrid {self.num_prefill}P{self.num_colocated}C τ={self.tau}"


def colocated(tau: int = 1024, num_gpus: int = 8) -> Variant:
    return Variant(0, num_gpus, tau)


def disaggregated(num_prefill: int = 5) -> Variant:
    return Variant(num_prefill, 8 - num_prefill, theta=math.inf)


def hybrid(num_prefill: int = 5, tau: int = 1024) -> Variant:
    return Variant(num_prefill, 8 - num_prefill, tau)


@dataclass(frozen=True)
class Point:
    """One curve at one load, in requests per second."""

    pair: Pair
    variant: Variant
    load: float
    calibration: Calibration = "as fitted"

    @property
    def config(self) -> SimulatorConfig:
        pair, variant = self.pair, self.variant
        changes: dict[str, Any] = {}
        if self.calibration == "no hand-over cost":
            changes["hand_over_s"] = 0.0
        return calibrated(
            pair.model,
            pair.trace,
            num_prefill=variant.num_prefill,
            num_colocated=variant.num_colocated,
            token_budget=variant.tau,
            overflow_threshold=variant.theta,
            **changes,
        )


@cache
def workload(pair: Pair, load: float, num_requests: int, seed: int) -> Workload:
    return draw(pair.trace, num_requests, seed, qps=load)


Results = Mapping[tuple[Point, int], Result]
"""(point, seed) -> its simulation."""


def simulate_all(
    points: Iterable[Point], seeds: Iterable[int], num_requests: int, num_processes: int | None, cache_dir: Path | None
) -> Results:
    """Raises: see `simulate`."""
    wanted = [(point, seed) for seed in seeds for point in dict.fromkeys(points)]
    runs = [Run(point.config, workload(point.pair, point.load, num_requests, seed)) for point, seed in wanted]
    results = run_many(runs, num_processes=num_processes, folder=cache_dir, label="simulating the paper")
    return dict(zip(wanted, results, strict=True))
