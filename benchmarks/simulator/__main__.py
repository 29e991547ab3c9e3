"""Simulates one configuration under one load: `python -m benchmarks.simulator`."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from backend.core.cache_policy import CACHE_POLICIES
from backend.core.step import PHASES
from benchmarks import results
from benchmarks.lengths import TRACES
from benchmarks.metrics import Objective
from benchmarks.simulator import hardware
from benchmarks.simulator.config import SimulatorConfig, calibrated
from benchmarks.simulator.denoising import Lognormal, Recorded
from benchmarks.simulator.latency import Efficiencies, Measured
from benchmarks.simulator.result import Result
from benchmarks.simulator.simulate import simulate
from benchmarks.simulator.workload import DEFAULT_QPS, Workload, draw

GRAPHS = ("colocated", "disaggregated", "hybrid", "conditional")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__)
    _add_graph(parser.add_argument_group("what is simulated"))
    _add_load(parser.add_argument_group("what is asked"))
    parser.add_argument("--slo-s", type=float, default=20.0, help="goodput: bound on end-to-end latency (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="writes summary.json and requests.csv there")
    arguments = parser.parse_args(argv)
    try:
        config, workload = _config(arguments), _workload(arguments)
        started = time.perf_counter()
        result = simulate(config, workload)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    took_s = time.perf_counter() - started
    summary = result.summary(Objective(arguments.slo_s))
    setup = {key: value for key, value in vars(arguments).items() if value is not None and key != "out"}
    setup |= {"mode": workload.mode, "name": result.name, "kv_cache_tokens": config.num_pages * config.page_size}
    setup |= {"steps_per_block": round(result.mean_steps_per_block, 3), "efficiency": config.rates.overall}
    setup = {key: str(value) if isinstance(value, Path) else value for key, value in setup.items()}
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{result.name} on {arguments.gpu}: {arguments.model}, {result.workload}")
    results.print_summary(summary, setup, console)
    _print_rest(result, console)
    console.print(f"{result.duration_s / took_s:.0f} times real time ({took_s:.1f} s)", style="dim")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        document = {"setup": setup, "summary": dataclasses.asdict(summary), **_rest(result)}
        results.write_json(arguments.out / "summary.json", document)
        result.write_csv(arguments.out / "requests.csv")
    return 0


def _add_graph(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", default="llada-8b", choices=hardware.models(), help="(%(default)s)")
    group.add_argument("--gpu", default="h100", choices=hardware.gpus(), help="(%(default)s)")
    group.add_argument("--graph", default="colocated", choices=GRAPHS, help="(%(default)s)")
    group.add_argument("--prefill", type=int, metavar="N", help="prefill workers (5; colocated: none)")
    group.add_argument("--colocated", type=int, metavar="N", help="colocated workers (3; colocated: 8)")
    group.add_argument(
        "--tau", type=_number_or_auto, default=1024, metavar="N", help="token budget, or auto (%(default)s)"
    )
    group.add_argument(
        "--theta", type=_number_or_auto, default=8192, metavar="N", help="overflow threshold, or auto (%(default)s)"
    )
    group.add_argument("--kv-cache-tokens", type=int, metavar="N", help="of each worker (calibrated, or by memory)")
    group.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="requests denoised together (64)")
    group.add_argument("--max-prefill-tokens", type=int, metavar="N", help="of a prefill worker's step")
    group.add_argument("--hop-ms", type=float, default=1.0, metavar="MS", help="a message, one way (%(default)g)")
    group.add_argument("--hand-over-ms", type=float, metavar="MS", help="a prefill worker's time for each hand-over")
    group.add_argument("--efficiency", type=float, metavar="X", help="part of the compute rates reached")
    group.add_argument("--profile", type=Path, metavar="CSV", help="measured step times instead of the roofline")
    group.add_argument("--steps-per-block", metavar="N|CSV", help="mean forwards of a block, or recorded ones")
    group.add_argument(
        "--cache-policy", default="dual", choices=[name for name in CACHE_POLICIES if name != "dkv-greedy"],
        help="of every request (%(default)s)",
    )  # fmt: skip
    group.add_argument("--cache-refresh-interval", type=int, metavar="N", help="steps between refreshes (the policy's)")
    group.add_argument(
        "--uncalibrated",
        action="store_true",
        help="no constants fitted to the paper's testbed: this project's own engine",
    )


def _number_or_auto(text: str) -> float | str:
    return text if text == "auto" else int(text) if text.isdecimal() else float(text)


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace", default="sharegpt", help=f"{', '.join(TRACES)}, or a CSV file of lengths (%(default)s)"
    )
    group.add_argument("--num-requests", type=int, default=4000, metavar="N", help="(%(default)s)")
    group.add_argument("--qps", type=float, help=f"mean requests per second ({DEFAULT_QPS}; a replay: its own)")
    group.add_argument(
        "--arrivals", default="poisson", metavar="PROCESS",
        help="poisson, gamma, bursts, closed, or a CSV file of arrival times (%(default)s)",
    )  # fmt: skip
    group.add_argument("--cv", type=float, default=2.0, help="gamma: deviation of gaps over their mean (%(default)s)")
    group.add_argument("--burst-size", type=int, default=8, metavar="N", help="bursts: requests at once (%(default)s)")
    group.add_argument("--clients", type=int, default=8, metavar="N", help="closed: how many clients (%(default)s)")
    group.add_argument(
        "--mode", default="whole-blocks", choices=("end-of-text", "fixed-length", "whole-blocks"),
        help="where answers end (%(default)s, as the paper's prototype)",
    )  # fmt: skip
    group.add_argument("--canvas-length", type=int, metavar="N", help="masks after each prompt (the paper's)")
    group.add_argument("--length-scale", type=float, default=1.0, metavar="X", help="multiplies a trace's lengths")
    group.add_argument("--max-total", type=int, metavar="N", help="leaves out longer prompt + output pairs")
    group.add_argument("--seed", type=int, default=1, help="of lengths, arrivals and forwards (%(default)s)")


def _config(arguments: argparse.Namespace) -> SimulatorConfig:
    """Raises ValueError: see `SimulatorConfig`."""
    is_colocated = arguments.graph == "colocated"
    changes: dict[str, Any] = {
        "gpu": arguments.gpu,
        "num_prefill": 0 if is_colocated else 5 if arguments.prefill is None else arguments.prefill,
        "num_colocated": arguments.colocated or (8 if is_colocated else 3),
        "token_budget": arguments.tau,
        "overflow_threshold": math.inf if arguments.graph == "disaggregated" else arguments.theta,
        "routing": "conditional" if arguments.graph == "conditional" else "hybrid",
        "max_num_seqs": arguments.max_num_seqs,
        "hop_s": arguments.hop_ms / 1000,
        "cache_policy": arguments.cache_policy,
        "cache_refresh_interval": arguments.cache_refresh_interval,
    }
    if is_colocated and arguments.prefill:
        raise ValueError("a colocated graph has no prefill workers")
    if arguments.kv_cache_tokens:
        changes["kv_cache_tokens"] = arguments.kv_cache_tokens
    if arguments.max_prefill_tokens:
        changes["max_prefill_tokens"] = arguments.max_prefill_tokens
    if arguments.hand_over_ms is not None:
        changes["hand_over_s"] = arguments.hand_over_ms / 1000
    if arguments.efficiency:
        changes["rates"] = Efficiencies(overall=arguments.efficiency)
    if arguments.profile:
        changes["latency"] = Measured(arguments.profile)
    if steps := arguments.steps_per_block:
        changes["steps"] = Recorded(Path(steps)) if steps.endswith(".csv") else Lognormal(float(steps))
    if arguments.uncalibrated:
        return SimulatorConfig(model=arguments.model, **changes)
    trace = arguments.trace if arguments.trace in TRACES else "sharegpt"
    return calibrated(arguments.model, trace, **changes)


def _workload(arguments: argparse.Namespace) -> Workload:
    """Raises ValueError or OSError: see `draw`."""
    is_process = arguments.arrivals in ("poisson", "gamma", "bursts", "closed")
    return draw(
        arguments.trace,
        arguments.num_requests,
        arguments.seed,
        qps=arguments.qps,
        process=arguments.arrivals if is_process else "poisson",
        cv=arguments.cv,
        burst_size=arguments.burst_size,
        num_clients=arguments.clients,
        replay=None if is_process else Path(arguments.arrivals),
        mode=arguments.mode.replace("-", " "),
        canvas_length=arguments.canvas_length,
        scale=arguments.length_scale,
        max_total=arguments.max_total,
    )


def _print_rest(result: Result, console: Console) -> None:
    phases = Table(
        "seconds of a request", "mean", "p50", "p90", "p99", "max", box=None, header_style="dim", pad_edge=False
    )
    for phase in PHASES:
        values = dataclasses.astuple(result.phase(phase))
        phases.add_row(phase.replace("_", " "), *(f"{value:.3f}" for value in values))
    console.print(phases)
    for name, use in result.pools.items():
        if use.num_workers:
            console.print(
                f"{name} pool: {use.num_workers} workers, {use.utilization:.1%} of the time in steps, "
                f"{use.num_prefills} prefills, {use.num_refreshes} refreshes within blocks, "
                f"{use.mean_batch:.1f} decodes per step"
            )
    if result.pools["prefill"].num_workers:
        console.print(f"{result.num_overflows} prefills overflowed")


def _rest(result: Result) -> dict[str, Any]:
    return {
        "phases": {phase: dataclasses.asdict(result.phase(phase)) for phase in PHASES},
        "pools": {name: dataclasses.asdict(use) for name, use in result.pools.items()},
        "num_overflows": result.num_overflows,
    }


if __name__ == "__main__":
    sys.exit(main())
