"""Find the configuration that bears the highest load within a service level objective, by simulation: which graph,
how to split the GPUs, which token budget (tau) and overflow threshold (theta). --out writes the YAML file to serve it.

Exit status: 0 there is a plan, 1 nothing meets the objective at any load, 2 it cannot be searched.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

MODULE = "benchmarks.planner.command"
"""A string: graphs import no benchmarks, which are not in the wheel."""
CHECKOUT = Path(__file__).resolve().parent.parent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    asked = parser.add_argument_group("what is asked")
    asked.add_argument(
        "--trace",
        required=True,
        help="sharegpt or arxiv (the paper's), or a CSV file of lengths: num_prompt_tokens,num_output_tokens",
    )
    asked.add_argument(
        "--canvas-length", type=int, metavar="N", help="masks after each prompt (CSV: each output's own)"
    )
    asked.add_argument(
        "--slo", required=True, metavar="BOUNDS", help='end to end, such as "p99<20s" or "p50<2.5s,mean<6s"'
    )
    machine = parser.add_argument_group("on what")
    machine.add_argument("--model", required=True, help="such as llada-8b or dream-7b")
    machine.add_argument("--gpu", required=True, help="such as h100, h200 or a100")
    machine.add_argument("--num-gpus", required=True, type=int, metavar="N", help="one worker on each")
    machine.add_argument(
        "--hand-over-ms", type=float, metavar="MS", help="a prefill worker's time for each hand-over (as calibrated)"
    )
    parser.add_argument("--seed", type=int, default=1, help="the same plan for the same seed (%(default)s)")
    parser.add_argument("--num-seeds", type=int, default=3, metavar="N", help="on which finalists run (%(default)s)")
    parser.add_argument(
        "--num-requests", type=int, default=1000, metavar="N", help="of each of these runs, at least (%(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="writes GRAPH.yaml and curve.png there")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Searches and prints; the exit status (see `benchmarks.planner.command.run`)."""
    if (CHECKOUT / "benchmarks" / "planner").is_dir():
        # An installed `sangam` has only what is in the wheel on its path. First, as others have a `benchmarks`, too.
        sys.path.insert(0, str(CHECKOUT))
    try:
        planner = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("benchmarks"):
            raise
        print("sangam plan: the simulator is not in the installed package; run it from a checkout", file=sys.stderr)
        return 2
    status: int = planner.run(arguments)
    return status
