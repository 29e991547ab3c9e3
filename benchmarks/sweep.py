"""Ways to serve, side by side, under growing load: `python -m benchmarks.sweep --live --out DIR`.

Starts each graph itself, by `sangam serve`, one at a time. Every variant gets the same seeded questions
at the same times; variants take turns at every load, each in processes of its own that were warmed up.

By default the questions have the lengths of the paper's ShareGPT trace at a quarter (random token ids,
fixed lengths, 256 masks appended, 16 forwards per block), and so have the thresholds: the demonstration
model's context is 2048 tokens. `--requests tasks` asks questions whose answers are checked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import cpu, options, progress, report, results, scrape
from benchmarks.client import Client, RequestFailed, first_model
from benchmarks.live_graph import GraphFailed, LiveGraph
from benchmarks.load_generator import open_loop, warm_up
from benchmarks.metrics import Objective, Outcome, summarize
from benchmarks.points import Measured, Point, order
from benchmarks.variants import Pools, Variant, variants

DEFAULT_VARIANTS = ("colocated", "disaggregated", "hybrid", "conditional")
SETTLE_S = 0.5
"""For the last request's metrics to arrive where they are shown."""
LOOK_S, QUIET_WAIT_S, MAX_TRIES = 3.0, 1800.0, 3


class Sweep:
    """Measures points on live graphs, one after the other."""

    def __init__(self, arguments: argparse.Namespace, known: dict[str, Variant], console: Console) -> None:
        self._arguments, self._known, self._console = arguments, known, console
        self._answers: dict[tuple[float, int], dict[int, str]] = {}
        self.results: list[Measured] = []
        self.num_processes: dict[str, int] = {}
        self.mode = options.decoding(arguments).mode

    def run(self, points: Sequence[Point]) -> Iterator[Measured]:
        """Raises GraphFailed if one does not start or is lost: a sweep with holes compares nothing."""
        for number, point in enumerate(points, 1):
            label = f"{number}/{len(points)} {point.variant} {point.rate:g}/s seed {point.seed}"
            measured = self._undisturbed(point, label)
            self.results.append(measured)
            summary = measured.summary
            self._console.print(
                f"{label}: mean {summary.latency.mean:.3f} s, p99 {summary.latency.p99:.3f} s, "
                f"{summary.completed_rate:.2f}/s, errors {dict(summary.errors) or 0}, "
                f"others' cores {measured.cores['others']:.2f}"
            )
            yield measured

    def _undisturbed(self, point: Point, label: str) -> Measured:
        limit = self._arguments.quiet
        measured = None
        for _ in range(1 if limit is None else MAX_TRIES):
            if limit is not None:
                self._wait_for_quiet(limit)
            again = self._measure(point, label)
            if measured is None or again.cores["others"] < measured.cores["others"]:
                measured = again
            if limit is None or measured.cores["others"] <= limit:
                break
        assert measured is not None
        return measured

    def _wait_for_quiet(self, limit: float) -> None:
        deadline = time.monotonic() + QUIET_WAIT_S
        while time.monotonic() < deadline:
            before = cpu.busy_s()
            time.sleep(LOOK_S)
            if (cpu.busy_s() - before) / LOOK_S <= limit:
                return

    def _measure(self, point: Point, label: str) -> Measured:
        variant = self._known[point.variant]
        with tempfile.TemporaryDirectory(prefix="sangam-sweep-") as folder:
            steps = Path(folder) / "steps.csv"
            arguments = [*variant.arguments, f"--steps-file={steps}", *self._arguments.serve]
            with LiveGraph(arguments, Path(folder)) as graph:
                self.num_processes[point.variant] = graph.num_processes
                return asyncio.run(self._load(graph, point, label, steps))

    async def _load(self, graph: LiveGraph, point: Point, label: str, steps: Path) -> Measured:
        arguments = self._arguments
        due = options.due(arguments, point.rate, point.seed)
        unseen = options.questions(arguments, point.seed + 1_000_000)
        model = await first_model(graph.url)
        async with Client(graph.url, model, options.decoding(arguments), arguments.timeout_s) as client:
            await warm_up(client.ask, unseen, arguments.warm_up)
            num_warm_up = len(steps.read_text())
            metrics, used, busy_s = graph.metrics(), cpu.used_s(graph.pid), cpu.busy_s()
            client_s, started = time.process_time(), time.monotonic()
            with progress.bar(len(due), label) as answered:
                outcomes = await open_loop(client.ask, due, answered)
            elapsed_s = time.monotonic() - started
            cores = {kind: s - used.get(kind, 0.0) for kind, s in cpu.used_s(graph.pid).items()}
            cores["client"] = time.process_time() - client_s
            cores["others"] = max(cpu.busy_s() - busy_s - sum(cores.values()), 0.0)
        time.sleep(SETTLE_S)
        repeat = f"-{point.repeat}" if point.repeat else ""
        kept = arguments.out / "steps" / f"{point.variant}-{point.rate:g}-{point.seed}{repeat}.csv"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text("request,num_steps\n" + steps.read_text()[num_warm_up:])
        return Measured(
            point,
            summarize(outcomes, arguments.duration_s, Objective(arguments.slo_s, arguments.slo_first_token_s)),
            scrape.breakdown(scrape.increase(metrics, graph.metrics())),
            {kind: seconds / elapsed_s for kind, seconds in cores.items()},
            self._num_differing(point, outcomes),
        )

    def _num_differing(self, point: Point, outcomes: Sequence[Outcome]) -> int:
        """How many answers are not those that came first to the same questions: serving must not change them."""
        answers = {outcome.index: outcome.text for outcome in outcomes if not outcome.error}
        first = self._answers.setdefault((point.rate, point.seed), answers)
        return sum(first.get(index, text) != text for index, text in answers.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults, names = Pools(), list(variants(Pools()))
    parser.add_argument("--live", action="store_true", required=True, help="on real graphs, started here")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="report.md, results.json, .csv, .png, steps/"
    )
    parser.add_argument("--variants", type=_names, default=list(DEFAULT_VARIANTS), help=f"of {', '.join(names)}")
    parser.add_argument("--loads", type=_numbers, default=[2.0, 4.0, 6.0], metavar="A,B", help="requests/s (2,4,6)")
    parser.add_argument("--duration-s", type=float, default=60.0, help="of each run (%(default)s)")
    parser.add_argument("--seeds", type=_whole_numbers, default=[1, 2], metavar="A,B", help="one run each (1,2)")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="runs of each seed: the noise")
    parser.add_argument("--warm-up", type=int, default=12, metavar="N", help="requests before each run (%(default)s)")
    parser.add_argument("--prefill", type=int, default=defaults.num_prefill, metavar="P", help="prefill workers (1)")
    parser.add_argument("--colocated", type=int, default=defaults.num_colocated, metavar="C", help="the others (2)")
    parser.add_argument("--theta", type=int, default=defaults.overflow_threshold, help="of Algorithm 2 (%(default)s)")
    parser.add_argument("--tau", type=int, default=defaults.token_budget, help="of Algorithm 1 (%(default)s)")
    parser.add_argument(
        "--prefill-tokens", type=int, default=defaults.max_prefill_tokens, help="a prefill worker's step (%(default)s)"
    )
    parser.add_argument(
        "--local-prefill", type=int, default=defaults.max_local_prefill_length, help="conditional's (%(default)s)"
    )
    parser.add_argument(
        "--quiet",
        type=float,
        metavar="CORES",
        help=f"waits until others use fewer, and measures up to {MAX_TRIES} times what was disturbed",
    )
    parser.add_argument(
        "--serve", action="append", default=[], metavar="FLAG", help="one more flag of every `sangam serve`; repeatable"
    )
    options.add_arrivals(parser)
    options.add_workload(parser)
    options.add_client(parser)
    parser.set_defaults(requests="sharegpt", length_scale=0.25, steps_per_block=16)
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _whole_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    pools = Pools(
        arguments.prefill,
        arguments.colocated,
        arguments.theta,
        arguments.tau,
        arguments.prefill_tokens,
        arguments.local_prefill,
    )
    known = variants(pools)
    if unknown := set(arguments.variants) - known.keys():
        parser.error(f"no variant {sorted(unknown)}; there are {', '.join(known)}")
    if arguments.arrivals == "closed":
        parser.error("a sweep over loads needs an open loop; --arrivals closed has no load")
    # One sequence may be longer than what a router takes at once by default; a sweep is to queue, not to refuse.
    arguments.serve = ["--max-queued-tokens=100000000", *arguments.serve]
    console = Console(soft_wrap=True, highlight=False)
    sweep = Sweep(arguments, known, console)
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        points = order(arguments.variants, arguments.loads, arguments.seeds, arguments.repeats)
        for _ in sweep.run(points):
            _write(arguments, sweep, [known[name] for name in arguments.variants])
    except (GraphFailed, RequestFailed, ValueError, OSError) as error:
        console.print(f"✗ {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    with contextlib.suppress(ImportError):  # matplotlib is an extra
        from benchmarks import plots

        plots.latencies(sweep.results, arguments.out / "latency.png")
    console.print((arguments.out / "report.md").read_text(), markup=False)
    return 0


def _write(arguments: argparse.Namespace, sweep: Sweep, compared: Sequence[Variant]) -> None:
    """After every point, so that what was measured is never lost."""
    out: Path = arguments.out
    setup = options.setup(arguments) | {"mode": sweep.mode, "num_cores": cpu.num_cores()}
    rows = [dataclasses.asdict(measured) for measured in sweep.results]
    results.write_json(out / "results.json", {"setup": setup, "num_processes": sweep.num_processes, "points": rows})
    results.write_points(out / "results.csv", sweep.results)
    (out / "report.md").write_text(report.document(setup, sweep.num_processes, compared, sweep.results))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the graph is stopped in order
    sys.exit(main())
