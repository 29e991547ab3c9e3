"""Regenerates the paper's figures and a table of its claims from the simulator: `python -m benchmarks.paper`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from benchmarks.paper import plots, report
from benchmarks.paper.figures import POINTS, sensitivity_points
from benchmarks.paper.points import Calibration, simulate_all
from benchmarks.paper.quantities import Seeded


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__)
    parser.add_argument("--figures", type=_numbers, default=tuple(POINTS), help="such as 9,10 (all)")
    parser.add_argument("--seeds", type=_numbers, default=(101, 102, 103), help="(101,102,103)")
    parser.add_argument("--num-requests", type=int, default=2000, metavar="N", help="per point (%(default)s)")
    parser.add_argument("--processes", type=int, metavar="N", help="simulations at once (as many as processors)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="of simulations (the user's cache)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="writes report.md and figure*.png there")
    arguments = parser.parse_args(argv)
    if unknown := sorted(set(arguments.figures) - set(POINTS)):
        parser.error(f"no figure {unknown[0]}; allowed: {', '.join(map(str, POINTS))}")
    started = time.perf_counter()
    points = [point for figure in arguments.figures for point in POINTS[figure]]
    if 9 in arguments.figures:
        points += [point for calibration in get_args(Calibration) for point in sensitivity_points(calibration)]
    results = simulate_all(points, arguments.seeds, arguments.num_requests, arguments.processes, arguments.cache)
    seededs = [Seeded(results, seed, arguments.num_requests) for seed in arguments.seeds]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for figure in arguments.figures:
        plots.draw(figure, seededs, arguments.out / f"figure{figure}.png")
    command = (
        f"python -m benchmarks.paper --figures {_joined(arguments.figures)} --seeds {_joined(arguments.seeds)} "
        f"--num-requests {arguments.num_requests}"
    )
    (arguments.out / "report.md").write_text(report.document(seededs, arguments.figures, command))
    print(f"{arguments.out / 'report.md'}: {len(results)} simulations, {time.perf_counter() - started:.0f} s")
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


if __name__ == "__main__":
    sys.exit(main())
