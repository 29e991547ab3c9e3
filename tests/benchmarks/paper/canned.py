"""Results that nobody simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.metrics import Distribution
from benchmarks.paper.points import Point
from benchmarks.paper.quantities import Seeded
from benchmarks.simulator.result import COLUMNS, Result


def result(columns: Mapping[str, Sequence[float]]) -> Result:
    """Columns that are not given are zero."""
    num_requests = len(next(iter(columns.values())))
    table = {name: np.array(columns.get(name, [0.0] * num_requests), dtype=np.float64) for name in COLUMNS}
    return Result("canned", "canned", "whole blocks", table, 1.0, Distribution(), {}, 0)


def seeded(latencies_s: Mapping[Point, Sequence[float]], seed: int = 1) -> Seeded:
    """Of points with these end-to-end latencies."""
    results = {(point, seed): result({"latency_s": values}) for point, values in latencies_s.items()}
    return Seeded(results, seed, 50)
