"""How many blocks a second the router's brain places: `python -m benchmarks.micro.routing`.

A quarter of the workers are prefill workers, the rest colocated; Algorithm 2 decides. A placement is
one block with all that is told of it: submitted, prefilled, handed over, freed at its source, done.
Blocks differ in size and end in random order. Regimes:

- nominal: the prefill pool is under its threshold; every block is prefilled there.
- overflow: the prefill pool is over its threshold about half of the time.
- saturated: all memory is taken; blocks wait in the central FIFO and as pending decodes.

Goal: 20,000 placements/s with 1,000 workers, and nearly the same with more or fewer. The time is CPU
time of the whole loop, the making of blocks and the choice of what ends next included.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from typing import TypeVar

from backend.core.ledger import Dispatch
from backend.core.placer import Placer
from backend.core.routing import HybridPolicy, Prefill, Route, RouteKind
from backend.core.worker_pool import WorkerLoad

GOAL = 20_000
PAGE_SIZE = 16
MIN_TOKENS, MAX_TOKENS = 300, 4000
MEAN_TOKENS = (MIN_TOKENS + MAX_TOKENS) / 2

Item = TypeVar("Item")


@dataclass(frozen=True)
class Regime:
    """Shares of the blocks in flight.

    Attributes:
        waiting: are assigned to be prefilled.
        threshold: may be so in the prefill pool until that is over its threshold.
        prefill_memory, colocated_memory: find memory in either pool.
    """

    waiting: float
    threshold: float
    prefill_memory: float
    colocated_memory: float


REGIMES = {
    "nominal": Regime(0.15, 1.0, 1.0, 2.0),
    "overflow": Regime(0.25, 0.1, 1.0, 2.0),
    "saturated": Regime(0.05, 0.1, 0.2, 0.3),
}


@dataclass(frozen=True)
class Figures:
    """What a run came to, and what waited at its end.

    Attributes:
        overflow_share: of the placements.
    """

    placements_per_s: float
    overflow_share: float
    num_queued: int
    num_pending: int


class Graph:
    """A placer, and workers that end in random order what is assigned to them."""

    def __init__(self, regime: Regime, num_workers: int, num_in_flight: int, seed: int = 0) -> None:
        self._random = random.Random(seed)
        num_prefill = max(1, num_workers // 4)
        num_colocated = num_workers - num_prefill
        in_flight_tokens = num_in_flight * MEAN_TOKENS
        threshold = max(1.0, regime.threshold * in_flight_tokens / num_prefill)
        self.placer = Placer(HybridPolicy(threshold), self._assigned)
        self._max_waiting = int(regime.waiting * num_in_flight)
        self._waiting: list[tuple[Dispatch, RouteKind]] = []
        self._moving: list[Dispatch] = []
        self._denoising: list[Dispatch] = []
        self._num_submitted = 0
        for worker_id in range(num_workers):
            if worker_id < num_prefill:
                pool, share = self.placer.prefill_pool, regime.prefill_memory / num_prefill
            else:
                pool, share = self.placer.colocated_pool, regime.colocated_memory / num_colocated
            num_tokens = max(MAX_TOKENS, share * in_flight_tokens)
            self.placer.show(WorkerLoad(worker_id, int(num_tokens) // PAGE_SIZE, PAGE_SIZE), pool)
        for _ in range(num_in_flight):
            self._submit()

    def place(self, count: int) -> None:
        """So many blocks end, and as many come."""
        for _ in range(count):
            self.placer.done(self._take(self._denoising))
            self._submit()

    def _assigned(self, dispatch: Dispatch, route: Route) -> None:
        if route.kind is RouteKind.DECODE:
            self._moving.append(dispatch)
        else:
            self._waiting.append((dispatch, route.kind))

    def _submit(self) -> None:
        self._num_submitted += 1
        number = self._num_submitted
        prefill = Prefill(self._random.randint(MIN_TOKENS, MAX_TOKENS), arrival_time=float(number))
        self.placer.submit((str(number), 0, 1), prefill)
        while self._moving or len(self._waiting) > self._max_waiting or (self._waiting and not self._denoising):
            if self._moving:
                dispatch = self._moving.pop()
                self.placer.source_freed(dispatch)
                self._denoising.append(dispatch)
                continue
            dispatch, kind = self._take(self._waiting)
            self.placer.prefilled(dispatch)
            if kind is RouteKind.PREFILL:
                self.placer.hand_over(dispatch)
            else:
                self._denoising.append(dispatch)

    def _take(self, items: list[Item]) -> Item:
        at = int(self._random.random() * len(items))
        items[at], items[-1] = items[-1], items[at]
        return items.pop()


def measure(regime: Regime, num_workers: int, num_in_flight: int, num_placements: int) -> Figures:
    graph = Graph(regime, num_workers, num_in_flight)
    graph.place(num_in_flight)
    placer = graph.placer
    num_overflows = placer.num_overflows
    started = time.thread_time()
    graph.place(num_placements)
    seconds = time.thread_time() - started
    overflow_share = (placer.num_overflows - num_overflows) / num_placements
    return Figures(num_placements / seconds, overflow_share, placer.num_queued, placer.num_pending_decodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1_000, 10_000])
    parser.add_argument("--in-flight", type=int, default=10_000, help="blocks; at least four to a worker")
    parser.add_argument("--placements", type=int, default=20_000, help="timed in each run")
    parser.add_argument("--runs", type=int, default=5, help="the best one counts")
    args = parser.parse_args()
    print(f"{'regime':>9} {'workers':>8} {'in flight':>10} {'placements/s':>13} {'goal':>7} {'overflow':>9}", end="")
    print(f" {'queued':>7} {'pending':>8}")
    for name, regime in REGIMES.items():
        for workers in args.workers:
            in_flight = max(args.in_flight, 4 * workers)
            runs = [measure(regime, workers, in_flight, args.placements) for _ in range(args.runs)]
            best = max(runs, key=lambda run: run.placements_per_s)
            print(f"{name:>9} {workers:>8,} {in_flight:>10,} {best.placements_per_s:>13,.0f} {GOAL:>7,}", end="")
            print(f" {best.overflow_share:>9.0%} {best.num_queued:>7,} {best.num_pending:>8,}", flush=True)


if __name__ == "__main__":
    main()
