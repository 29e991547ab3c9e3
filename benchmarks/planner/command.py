"""What `sangam plan` does (see `graphs.plan`)."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from rich.console import Console

from benchmarks import progress
from benchmarks.lengths import TRACES
from benchmarks.planner import report, serving
from benchmarks.planner.planning import NUM_BOUNDS, SCREENING, Effort, Infeasible, Plan, Planner
from benchmarks.planner.slo import Slo
from benchmarks.planner.space import graph_of
from benchmarks.planner.trial import Demand, Trials
from benchmarks.simulator import hardware
from benchmarks.simulator.config import SimulatorConfig, calibrated

MIDDLING_BUDGET = 2048


def run(arguments: argparse.Namespace, screening: Effort = SCREENING, num_bounds: float = NUM_BOUNDS) -> int:
    """Searches, prints and writes; the exit status: 0, or 1 if nothing meets the objective, or 2 for bad arguments.

    Args:
        num_bounds: of finalists' runs; see `Effort`.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False)
    try:
        demand, base = _demand(arguments), _base(arguments)
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
        plan = _plan(arguments, demand, base, screening, Effort(arguments.num_requests, num_bounds))
        report.show(plan, demand.slo, console)
        _write(arguments, demand, plan, console)
    except Infeasible as error:
        report.show_infeasible(error, demand.slo, console)
        return 1
    except (ValueError, OSError) as error:
        print(f"sangam plan: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _demand(arguments: argparse.Namespace) -> Demand:
    demand = Demand(arguments.trace, Slo.parse(arguments.slo), arguments.canvas_length)
    demand.workload(1, arguments.seed, 1.0)  # a mistake shows now
    return demand


def _base(arguments: argparse.Namespace) -> SimulatorConfig:
    for name in ("num_gpus", "num_seeds", "num_requests"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(arguments, name)}")
    if arguments.model not in hardware.models():
        raise ValueError(f"--model {arguments.model} is not known; allowed: {', '.join(hardware.models())}")
    changes: dict[str, Any] = {"gpu": arguments.gpu, "token_budget": MIDDLING_BUDGET}
    if arguments.hand_over_ms is not None:
        changes["hand_over_s"] = arguments.hand_over_ms / 1000
    return calibrated(arguments.model, arguments.trace if arguments.trace in TRACES else "sharegpt", **changes)


def _plan(
    arguments: argparse.Namespace, demand: Demand, base: SimulatorConfig, screening: Effort, finals: Effort
) -> Plan:
    with (
        progress.steps(None, "simulating") as advance,
        Trials(demand, os.cpu_count() or 1, lambda: advance("")) as trials,
    ):
        planner = Planner(
            base,
            demand.slo,
            trials.ask,
            seed=arguments.seed,
            num_seeds=arguments.num_seeds,
            screening=screening,
            finals=finals,
        )
        return planner.plan(arguments.num_gpus)


def _write(arguments: argparse.Namespace, demand: Demand, plan: Plan, console: Console) -> None:
    best = plan.best
    graph = graph_of(best.config)
    yaml = serving.text(
        best.config,
        f"{best.load:.2f} requests/s within {demand.slo} in simulation: {arguments.model} on {arguments.num_gpus} "
        f"{arguments.gpu}, {arguments.trace}, seed {arguments.seed}",
        canvas_length=demand.workload(1, arguments.seed, 1.0).canvas_length,
        peak_tokens=best.peak_tokens,
    )
    if not arguments.out:
        console.print(f"\n{yaml}")
        return
    path = arguments.out / f"{graph}.yaml"
    path.write_text(yaml)
    console.print(f"\nsangam serve {graph} -f {path} --model DIR")
    try:
        report.draw(plan, demand.slo, arguments.out / "curve.png")
    except ImportError as error:
        console.print(f"no curve.png: {error}")
