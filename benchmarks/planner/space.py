"""What is searched: graphs, splits of the GPUs, token budgets (tau) and overflow thresholds (theta)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.simulator.config import SimulatorConfig

GRAPHS = ("colocated", "disaggregated", "hybrid")
TOKEN_BUDGETS = (512, 1024, 2048, 4096, 16384)
OVERFLOW_THRESHOLDS = (2048, 4096, 8192, 16384, 32768)
MAX_SPLITS = 9


def graph_of(config: SimulatorConfig) -> str:
    """Which graph of `sangam serve` it is."""
    if not config.num_prefill:
        return "colocated"
    return "disaggregated" if config.overflow_threshold == math.inf else "hybrid"


def num_gpus(config: SimulatorConfig) -> int:
    return config.num_prefill + config.num_colocated


def splits(base: SimulatorConfig, num_gpus: int, graph: str) -> list[SimulatorConfig]:
    """One configuration per split, `base` otherwise; of many splits only some, spread evenly."""
    if graph == "colocated":
        return [replace(base, num_prefill=0, num_colocated=num_gpus)]
    every = range(1, num_gpus)
    spread = (
        every
        if len(every) <= MAX_SPLITS
        else [round(n * num_gpus / (MAX_SPLITS + 1)) for n in range(1, MAX_SPLITS + 1)]
    )
    theta = math.inf if graph == "disaggregated" else base.overflow_threshold
    return [replace(base, num_prefill=n, num_colocated=num_gpus - n, overflow_threshold=theta) for n in spread]


def budgets(configs: Sequence[SimulatorConfig]) -> list[SimulatorConfig]:
    """Each with every tau, the nearest to its own first: where they do equally well, the first wins."""
    return [
        replace(config, token_budget=tau)
        for config in configs
        for tau in sorted(TOKEN_BUDGETS, key=lambda tau: abs(math.log(tau / int(config.token_budget))))
    ]


def thresholds(configs: Sequence[SimulatorConfig]) -> list[SimulatorConfig]:
    """Each with every theta, in the same order."""
    return [
        replace(config, overflow_threshold=theta)
        for config in configs
        for theta in sorted(
            OVERFLOW_THRESHOLDS, key=lambda theta: abs(math.log(theta / float(config.overflow_threshold)))
        )
    ]
