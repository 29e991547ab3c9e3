"""What one router's placer costs among 1,000 workers and more: `python -m benchmarks.beyond.one_router`.

The live `Placer` in a simulated graph at its knee, timed call by call. A core that does nothing but place is busy all
the time at the number of GPUs given; streams, HTTP and load reports come on top.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from backend.core.placer import Placer
from benchmarks.beyond.ideas import BASELINES, Baseline
from benchmarks.beyond.scale import run_of
from benchmarks.simulator.config import SimulatorConfig
from benchmarks.simulator.graph import Graph
from benchmarks.simulator.simulate import simulate

CALLS = ("submit", "prefilled", "hand_over", "source_freed", "done")


class TimedPlacer(Placer):
    """Attributes:
    busy_s: CPU time in its calls, what they tell the graph and the clock itself included.
    num_blocks: submitted.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.busy_s, self.num_blocks, self._is_inside = 0.0, 0, False
        for name in CALLS:
            setattr(self, name, self._timed(getattr(self, name), name == "submit"))

    def _timed(self, call: Callable[..., None], is_submit: bool) -> Callable[..., None]:
        def timed(*arguments: Any) -> None:
            if self._is_inside:
                return call(*arguments)
            self._is_inside, started = True, time.thread_time()
            call(*arguments)
            self.busy_s += time.thread_time() - started
            self._is_inside = False
            self.num_blocks += is_submit

        return timed


class TimedGraph(Graph):
    def _placer(self, config: SimulatorConfig) -> TimedPlacer:
        return TimedPlacer(config.policy(), self._assigned)


@dataclass(frozen=True)
class Cost:
    """Attributes:
    blocks_per_s: that the graph ends at its knee.
    block_s: CPU time of the placer for one of them.
    mean_s: end-to-end latency.
    """

    num_workers: int
    num_requests: int
    blocks_per_s: float
    block_s: float
    mean_s: float

    @property
    def cores(self) -> float:
        return self.blocks_per_s * self.block_s

    @property
    def max_workers(self) -> float:
        """That one core places for."""
        return self.num_workers / self.cores


def measure(baseline: Baseline, num_workers: int, duration_s: float, seed: int) -> Cost:
    """Raises: see `simulate`."""
    graphs: list[TimedGraph] = []

    def make(*arguments: Any) -> Graph:
        graphs.append(TimedGraph(*arguments))
        return graphs[0]

    run = run_of(baseline, num_workers, seed, duration_s=duration_s)
    result = simulate(run.config, run.workload, make_graph=make)
    placer = graphs[0].placer
    assert isinstance(placer, TimedPlacer)
    per_request = placer.num_blocks / len(run.workload.lengths)
    blocks_per_s = baseline.knee * num_workers / 8 * per_request
    return Cost(
        num_workers,
        len(run.workload.lengths),
        blocks_per_s,
        placer.busy_s / placer.num_blocks,
        result.latency.mean,
    )


def markdown(baseline: Baseline, costs: Sequence[Sequence[Cost]]) -> str:
    """Args:
    costs: of each size, one per repeat.
    """
    lines = [
        f"{baseline.name}, one router, at its knee ({baseline.knee / 8:.2f} requests/s per GPU).\n",
        "| workers | requests | mean latency, s | blocks/s | placer, µs per block | % of one core | GPUs of one core |",
        "|---|---|---|---|---|---|---|",
    ]
    for repeats in costs:
        first = repeats[0]
        cells = (
            _range([1e6 * cost.block_s for cost in repeats], ".0f"),
            _range([100 * cost.cores for cost in repeats], ".3g"),
            _range([cost.max_workers for cost in repeats], ",.0f"),
        )
        lines.append(
            f"| {first.num_workers:,} | {first.num_requests:,} | {first.mean_s:.2f} | {first.blocks_per_s:,.0f} | "
            f"{' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def _range(values: Sequence[float], shown: str) -> str:
    low, high = f"{min(values):{shown}}", f"{max(values):{shown}}"
    return low if low == high else f"{low} to {high}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beyond.one_router", description=__doc__)
    parser.add_argument("--workers", default="8,1000", help="such as 8,1000,10000 (%(default)s)")
    parser.add_argument("--worker-seconds", type=float, default=10_000.0, metavar="S", help="requests are due for so "
                        "long, over the number of workers, and for 100 s at most (%(default)g)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="of the same simulation (%(default)s)")
    arguments = parser.parse_args(argv)
    for baseline in BASELINES[:2]:
        costs = [
            [
                measure(baseline, size, min(arguments.worker_seconds / size, 100.0), arguments.seed)
                for _ in range(arguments.repeats)
            ]
            for size in map(int, arguments.workers.split(","))
        ]
        print(markdown(baseline, costs), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
