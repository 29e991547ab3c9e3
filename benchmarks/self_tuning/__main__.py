"""Holds settings of "auto" against fixed values, simulated: `python -m benchmarks.self_tuning`."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.self_tuning import report
from benchmarks.self_tuning.cases import COMPARISONS, FIRST_SEED
from benchmarks.self_tuning.measure import measure
from benchmarks.simulator.runs import run_many


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.self_tuning", description=__doc__)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, metavar="N", help="(%(default)s)")
    parser.add_argument("--num-seeds", type=int, metavar="N", help="of every point (each comparison's own)")
    parser.add_argument("--num-requests", type=int, default=500, metavar="N", help="of a run (%(default)s)")
    parser.add_argument("--comparisons", default=",".join(COMPARISONS), help="which (%(default)s)")
    parser.add_argument("--processes", type=int, metavar="N", help="simulations at once (as many as processors)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="of simulations (the user's cache)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="writes report.md there")
    arguments = parser.parse_args(argv)
    if unknown := sorted(set(arguments.comparisons.split(",")) - set(COMPARISONS)):
        parser.error(f"no comparison {unknown[0]!r}; allowed: {', '.join(COMPARISONS)}")
    started = time.perf_counter()
    run_all = partial(run_many, num_processes=arguments.processes, folder=arguments.cache)
    parts = []
    for name in arguments.comparisons.split(","):
        comparison = COMPARISONS[name]
        num_seeds = arguments.num_seeds or comparison.num_seeds
        seeds = range(arguments.first_seed, arguments.first_seed + num_seeds)
        rows = measure(comparison, seeds, arguments.num_requests, run_all)
        parts.append(
            f"## {name.capitalize()}: {comparison.setting}, {num_seeds} seeds\n\n{report.in_short(rows)}\n"
            f"{report.by_case(rows, comparison)}\nEach value against the best of each load:\n\n"
            f"{report.by_value(rows, comparison)}"
        )
    tables = "\n".join(parts)
    command = f"python -m benchmarks.self_tuning --comparisons {shlex.quote(arguments.comparisons)}"
    if arguments.first_seed != FIRST_SEED:
        command += f" --first-seed {arguments.first_seed}"
    if arguments.num_seeds:
        command += f" --num-seeds {arguments.num_seeds}"
    text = f"""# Settings that tune themselves, simulated

`{command} --num-requests {arguments.num_requests}`

8 H100s, the paper's prototype as calibrated to its testbed. All values are given the same requests; seeds from
{arguments.first_seed} on. The best fixed value is chosen anew for every load and metric, by the geometric mean over
seeds; ratios are per seed: geometric mean and range. * past the knee. Nothing here was measured on a GPU.

{tables}"""
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "report.md").write_text(text)
    print(f"{arguments.out / 'report.md'}: {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
