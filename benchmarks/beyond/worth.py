"""What an idea is worth: latency at the baseline's knee, and the load that it carries at the knee's latency."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.beyond import ideas
from benchmarks.beyond.ideas import NONE, Baseline, Idea
from benchmarks.paper.knee import load_at
from benchmarks.simulator.result import Result
from benchmarks.simulator.runs import Run

LOADS = tuple(round(0.7 + 0.05 * step, 2) for step in range(21))
"""Of the baseline's knee."""

RunAll = Callable[[Sequence[Run]], Sequence[Result]]


@dataclass(frozen=True)
class Worth:
    """Ratios to the baseline, one per seed; capacity is the load at the baseline's mean latency at its knee."""

    baseline: Baseline
    idea: Idea
    mean: tuple[float, ...]
    p99: tuple[float, ...]
    capacity: tuple[float, ...]


@dataclass(frozen=True)
class _Case:
    baseline: Baseline
    idea: Idea
    seed: int


def measure(
    baselines: Iterable[Baseline], of: Sequence[Idea], seeds: Sequence[int], num_requests: int, run_all: RunAll
) -> list[Worth]:
    """Raises: see `simulate`."""
    pairs = [(b, idea) for b in baselines for idea in (NONE, *of) if b.num_prefill or not idea.needs_prefill]
    cases = [_Case(*pair, seed) for pair in pairs for seed in seeds]
    latencies: dict[_Case, dict[float, tuple[float, float]]] = {case: {} for case in cases}
    wanted = dict.fromkeys(cases, 1.0)
    while wanted:
        runs = [ideas.run(case.baseline, case.idea, load, case.seed, num_requests) for case, load in wanted.items()]
        for (case, load), result in zip(wanted.items(), run_all(runs), strict=True):
            latencies[case][load] = result.latency.mean, result.latency.p99
        wanted = {}
        for case in cases:
            target = latencies[_Case(case.baseline, NONE, case.seed)][1.0][0]
            if (then := next_load({at: mean for at, (mean, _) in latencies[case].items()}, target)) is not None:
                wanted[case] = then
    return [
        Worth(baseline, idea, *zip(*(_ratios(_Case(baseline, idea, seed), latencies) for seed in seeds), strict=True))
        for baseline, idea in pairs
    ]


def next_load(means: Mapping[float, float], target: float) -> float | None:
    """The load to try next on the way to where the mean is `target`; None: that lies between two, or off the scale."""
    low, high = min(means), max(means)
    if means[low] > target:
        at = LOADS.index(low) - 1
    elif means[high] < target:
        at = LOADS.index(high) + 1
    else:
        return None
    return LOADS[at] if 0 <= at < len(LOADS) else None


def _ratios(case: _Case, latencies: Mapping[_Case, Mapping[float, tuple[float, float]]]) -> tuple[float, float, float]:
    target, target_p99 = latencies[_Case(case.baseline, NONE, case.seed)][1.0]
    mean, p99 = latencies[case][1.0]
    curve = [(load, mean) for load, (mean, _) in sorted(latencies[case].items())]
    capacity = 1.0 if mean == target else load_at(curve, target)
    return mean / target, p99 / target_p99, capacity


def markdown(found: Sequence[Worth]) -> str:
    """One table per baseline."""
    parts = []
    for baseline in dict.fromkeys(worth.baseline for worth in found):
        lines = [
            f"### {baseline.name}, {baseline.knee:g} requests/s\n",
            "| | mean | p99 | capacity |",
            "|---|---|---|---|",
        ]
        for worth in found:
            if worth.baseline is baseline and worth.idea is not NONE:
                cells = " | ".join(map(spread, (worth.mean, worth.p99, worth.capacity)))
                lines.append(f"| {worth.idea.name} | {cells} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def spread(values: Sequence[float]) -> str:
    """Median and range, if there is one."""
    low, middle, high = map(_number, (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def _number(value: float) -> str:
    if math.isinf(value):
        return f"over {LOADS[-1]:g}" if value > 0 else f"under {LOADS[0]:g}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
