"""Runs a comparison; ratios of auto to the best fixed value, chosen anew for each load and metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from benchmarks.self_tuning.cases import Case, Comparison
from benchmarks.simulator.result import Result
from benchmarks.simulator.runs import Run

RunAll = Callable[[Sequence[Run]], Sequence[Result]]
METRICS = ("mean", "p99")


@dataclass(frozen=True)
class Row:
    """One case and metric.

    Attributes:
        seconds: per value (auto is one of them), one latency per seed.
    """

    case: Case
    metric: str
    seconds: dict[int | str, tuple[float, ...]]

    @property
    def best(self) -> int:
        """The fixed value of the least latency: the geometric mean over seeds."""
        fixed = [value for value in self.seconds if isinstance(value, int)]
        return min(fixed, key=lambda value: geometric_mean(self.seconds[value]))

    def ratios(self, value: int | str) -> list[float]:
        """To the best, per seed."""
        return [ours / best for ours, best in zip(self.seconds[value], self.seconds[self.best], strict=True)]

    def ratio(self, value: int | str) -> float:
        return geometric_mean(self.ratios(value))


def measure(comparison: Comparison, seeds: Sequence[int], num_requests: int, run_all: RunAll) -> list[Row]:
    """Raises: see `simulate`."""
    values = comparison.values
    wanted = [(case, value, seed) for case in comparison.cases for value in values for seed in seeds]
    runs = [case.run(comparison.settings(value), seed, num_requests) for case, value, seed in wanted]
    found = dict(zip(wanted, (result.latency for result in run_all(runs)), strict=True))
    return [
        Row(
            case,
            metric,
            {value: tuple(getattr(found[case, value, seed], metric) for seed in seeds) for value in values},
        )
        for case in comparison.cases
        for metric in METRICS
    ]
