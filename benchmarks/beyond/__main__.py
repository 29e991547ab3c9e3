"""What ideas beyond the paper are worth, and what scale costs, simulated: `python -m benchmarks.beyond`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.beyond import scale, worth
from benchmarks.beyond.ideas import BASELINES, IDEAS, IN_PLACE, MORE_COLOCATED
from benchmarks.simulator.runs import run_many


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beyond", description=__doc__)
    parser.add_argument("--seeds", default="101,102,103", metavar="N,N", help="(%(default)s)")
    parser.add_argument("--num-requests", type=int, default=1000, metavar="N", help="of an idea's run (%(default)s)")
    parser.add_argument("--processes", type=int, metavar="N", help="simulations at once (as many as processors)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="of simulations (the user's cache)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="writes report.md there")
    arguments = parser.parse_args(argv)
    started = time.perf_counter()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    run_all = partial(run_many, num_processes=arguments.processes, folder=arguments.cache)
    found = worth.measure(BASELINES, IDEAS, seeds, arguments.num_requests, run_all)
    found += worth.measure(MORE_COLOCATED, IN_PLACE, seeds, arguments.num_requests, run_all)
    measured = {num_workers: scale.placements(num_workers) for num_workers in (1_000, 10_000)}
    command = f"python -m benchmarks.beyond --seeds {arguments.seeds} --num-requests {arguments.num_requests}"
    text = f"""# Beyond the paper, simulated

`{command}`

Seeds {arguments.seeds}; median over them, range in brackets. The baseline is the paper's prototype as calibrated to its
testbed (hand-over 4 ms, LM head on all positions), 8 H100s, τ 1024, θ 8192. Nothing here was measured on a GPU, except
that placements/s were measured on a CPU.

## Ideas

{arguments.num_requests} requests at the baseline's knee, ratios to the baseline on the same seed. Capacity: the load at
which the mean is the baseline's at its knee, over that knee, between loads 5% apart.

{worth.markdown(found)}
## Size

The same load per GPU for {scale.DURATION_S:g} s, one router, one seed from 512 workers on.

{scale.sizes(seeds, run_all)}
## One router's limit

{scale.saturation(seeds, run_all, measured)}
A router reads {scale.reports_per_s():,.0f} load reports a second per core; every worker sends 5.

## Several routers

{scale.HYBRID.name}, at its knee for {scale.DURATION_S:g} s: mean over one router's mean, p99 over its p99.

{scale.routers(8, scale.ROUTERS, seeds, run_all)}
{scale.routers(64, (8,), seeds[:1], run_all)}"""
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "report.md").write_text(text)
    print(f"{arguments.out / 'report.md'}: {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
