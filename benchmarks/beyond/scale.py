"""More workers, and more routers than one."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from benchmarks.beyond.ideas import BASELINES, Baseline
from benchmarks.beyond.routers import SeveralRouters
from benchmarks.beyond.worth import RunAll, spread
from benchmarks.micro import routing
from benchmarks.simulator.config import calibrated
from benchmarks.simulator.result import Result
from benchmarks.simulator.runs import Run
from benchmarks.simulator.workload import draw
from components.protocol import LoadReport, ModelCard

SIZES = (8, 64, 512)
ROUTERS = (2, 4, 8)
REPORTS: Mapping[str, tuple[float | None, bool]] = {
    "reports every 0.1 s": (0.1, True),
    "every 0.5 s": (0.5, True),
    "every 1 s": (1.0, True),
    "every 0.5 s, without o_w": (0.5, False),
    "no reports": (None, False),
}
DURATION_S = 100.0
HYBRID = BASELINES[1]


def run_of(
    baseline: Baseline,
    num_workers: int,
    seed: int,
    routers: SeveralRouters | None = None,
    duration_s: float | None = None,
) -> Run:
    """The baseline's split and its load per worker at the knee, on more workers; for `DURATION_S` unless told."""
    num_prefill = baseline.num_prefill * num_workers // 8
    config = calibrated(
        baseline.model, baseline.trace, num_prefill=num_prefill, num_colocated=num_workers - num_prefill
    )
    qps = baseline.knee * num_workers / 8
    run = Run(config, draw(baseline.trace, round(qps * (duration_s or DURATION_S)), seed, qps=qps))
    return replace(run, make_graph=routers) if routers else run


def seeds_of(num_workers: int, seeds: Sequence[int]) -> Sequence[int]:
    """Large graphs average over themselves: one seed from 512 workers on."""
    return seeds if num_workers < 512 else seeds[:1]


def sizes(seeds: Sequence[int], run_all: RunAll) -> str:
    """Markdown: latency against the number of workers. Raises: see `simulate`."""
    lines = ["| | workers | requests | of the rate asked for | mean s | p99 s |", "|---|---|---|---|---|---|"]
    for baseline in BASELINES[:2]:
        for num_workers in SIZES:
            runs = [run_of(baseline, num_workers, seed) for seed in seeds_of(num_workers, seeds)]
            results = run_all(runs)
            rates = [run.workload.achieved_rate / (baseline.knee * num_workers / 8) for run in runs]
            cells = (spread(rates), spread(_latency(results, "mean")), spread(_latency(results, "p99")))
            lines.append(
                f"| {baseline.name} | {num_workers} | {len(runs[0].workload.lengths):,} | {' | '.join(cells)} |"
            )
    return "\n".join(lines) + "\n"


def routers(num_workers: int, numbers: Sequence[int], seeds: Sequence[int], run_all: RunAll) -> str:
    """Markdown: mean and p99 of several routers over those of one, on the same seed. Raises: see `simulate`."""
    ones = run_all([run_of(HYBRID, num_workers, seed) for seed in seeds])
    lines = [
        f"| {num_workers} workers | {' | '.join(REPORTS)} |",
        "|---" * (len(REPORTS) + 1) + "|",
    ]
    for number in numbers:
        cells = []
        for reports in REPORTS.values():
            way = SeveralRouters(number, *reports)
            several = run_all([run_of(HYBRID, num_workers, seed, way) for seed in seeds])
            mean, p99 = (
                [ours / one for ours, one in zip(_latency(several, of), _latency(ones, of), strict=True)]
                for of in ("mean", "p99")
            )
            cells.append(f"{spread(mean)}, p99 {statistics.median(p99):.2f}")
        lines.append(f"| {number} routers | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _latency(results: Sequence[Result], of: str) -> list[float]:
    return [getattr(result.latency, of) for result in results]


def placements(num_workers: int) -> Mapping[str, float]:
    """Placements a second of one router on this machine, by regime."""
    num_in_flight = max(10_000, 4 * num_workers)
    return {
        name: max(routing.measure(regime, num_workers, num_in_flight, 20_000).placements_per_s for _ in range(2))
        for name, regime in routing.REGIMES.items()
    }


def reports_per_s(num_reports: int = 5000) -> float:
    """Load reports that one core reads a second, as `LoadBus.listen` does, without what NATS itself takes."""
    card = ModelCard("0" * 64, 126464, 126336, (126081,), 4096)
    data = json.dumps(asdict(LoadReport(1, "colocated_worker", card, False, 16, 5632, 100, 3, 30, 6000))).encode()
    started = time.thread_time()
    for _ in range(num_reports):
        LoadReport.from_wire(json.loads(data))
    return num_reports / (time.thread_time() - started)


def saturation(seeds: Sequence[int], run_all: RunAll, measured: Mapping[int, Mapping[str, float]]) -> str:
    """Markdown: how many GPUs one router serves at the knee: placements/s over blocks/s of a GPU."""
    lines = ["| placements/s | " + " | ".join(f"{n:,} workers" for n in measured) + " |"]
    lines.append("|---" * (len(measured) + 1) + "|")
    for regime in routing.REGIMES:
        lines.append(f"| {regime} | " + " | ".join(f"{of[regime]:,.0f}" for of in measured.values()) + " |")
    lines += ["", "| | requests/s per GPU | blocks per request | blocks/s per GPU | GPUs of one router |"]
    lines.append("|---|---|---|---|---|")
    rates = [rate for of in measured.values() for rate in of.values()]
    for baseline in BASELINES:
        result = run_all([run_of(baseline, 8, seeds[0])])[0]
        num_blocks = float(result.requests["num_blocks"].mean())
        per_gpu = baseline.knee / 8
        low, high = (rate / (per_gpu * num_blocks) for rate in (min(rates), max(rates)))
        lines.append(
            f"| {baseline.name} | {per_gpu:.2f} | {num_blocks:.1f} | {per_gpu * num_blocks:.1f} | "
            f"{low:,.0f} to {high:,.0f} |"
        )
    return "\n".join(lines) + "\n"
