"""A made-up cluster: its capacity is a formula, its latency grows towards it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from benchmarks.planner.slo import Slo
from benchmarks.planner.trial import Point, Trial
from benchmarks.simulator.config import SimulatorConfig

BEST_BUDGET, BEST_THRESHOLD, BEST_PREFILL = 1024, 16384, 5


def capacity(config: SimulatorConfig) -> float:
    """Of 8 GPUs; hybrid 5P3C with tau 1024 and theta 16384 bears the most, 8.8/s."""
    tau = 1 - 0.02 * abs(math.log2(config.token_budget / BEST_BUDGET))
    if not config.num_prefill:
        return 7.0 * tau
    split = 1 - 0.1 * abs(config.num_prefill - BEST_PREFILL)
    if math.isinf(config.overflow_threshold):
        return 6.0 * split
    return 8.8 * tau * split * (1 - 0.03 * abs(math.log2(config.overflow_threshold / BEST_THRESHOLD)))


class Cluster:
    """Answers trials by a capacity, each seed's off by up to `noise`."""

    def __init__(
        self, slo: Slo, noise: float = 0.0, lone_s: float = 1.0, of: Callable[[SimulatorConfig], float] = capacity
    ) -> None:
        self._slo, self._noise, self._lone_s, self._of = slo, noise, lone_s, of
        self.asked: list[Trial] = []

    def ask(self, trials: Sequence[Trial]) -> list[Point]:
        self.asked += trials
        return [self._point(trial) for trial in trials]

    def _point(self, trial: Trial) -> Point:
        rng = random.Random(repr((trial.config, trial.load, trial.seed)))
        limit = self._of(trial.config) * (1 + self._noise * rng.uniform(-1, 1))
        # All figures alike, and the objective's bound reached at the limit.
        bound_s = self._slo.loosest_s
        seconds = self._lone_s + max(bound_s - self._lone_s, 0.0) * trial.load / limit
        return Point(seconds / bound_s, seconds, seconds, (seconds,) * len(self._slo.bounds), round(1000 * trial.load))
