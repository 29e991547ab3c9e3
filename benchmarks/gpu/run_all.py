"""Everything worth measuring on one GPU in one go: `python -m benchmarks.gpu.run_all --out DIR`.

Models have the published shapes and random weights, so nothing is downloaded. In order, each part skipped
if the time that is left does not do for it:

1. checks: FlashInfer, CUDA graphs and the Triton kernels against torch (`pytest -m gpu`).
2. step times of decodes and prefills beside the roofline (the paper's Figure 3), what launching ahead and the
   graphs are worth, and `latency-MODEL.csv`, which the simulator reads.
3. how busy the GPU is while decoding.
4. one colocated engine under the load of a trace for several token budgets, and the load that one request at a
   time carries at the same mean latency (Figure 8).

Everything goes to DIR/report.md and DIR/results.json as it is known; a part that fails is there with its
traceback, and the others run all the same. `--toy` tries all of it on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from backend.core.scheduler import SchedulerConfig
from backend.engine.engine import Engine, EngineConfig
from benchmarks.gpu.busy import busy_share
from benchmarks.gpu.engines import BLOCK_LENGTH, clear, request, with_budget
from benchmarks.gpu.report import document
from benchmarks.gpu.serving import jobs, rate_at_latency, serve
from benchmarks.gpu.shapes import TOY, random_model, shapes
from benchmarks.gpu.step_times import decode_time, prefill_time, write_csv

T = TypeVar("T")
TOKEN_BUDGET = 16384
"""While steps are measured: all blocks have to be prefilled before the first of them ends."""
MEAN_STEPS = {"llada": 15.9, "dream": 20.5}
"""Forwards per block that the paper's ShareGPT figures fit (see benchmarks/paper)."""
# One check that hangs must leave time to measure.
_CHECKS_SHARE = 0.4


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is run: sizes that suit a machine.

    Attributes:
        rates: requests/s of part 4.
        scale: of the trace's lengths.
    """

    models: tuple[str, ...]
    device: str
    dtype: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prefills: tuple[int, ...]
    token_budgets: tuple[int, ...]
    rates: tuple[float, ...]
    num_requests: int
    scale: float
    kv_cache_tokens: int
    max_num_seqs: int


FULL = Setup(
    models=("llada-8b", "dream-7b"),
    device="cuda",
    dtype="bfloat16",
    batches=(1, 2, 4, 8, 16, 32, 48, 64),
    contexts=(1024, 2048),
    prefills=(256, 1024, 1819, 3500),
    token_budgets=(512, 1024, 2048, 16384),
    rates=(0.8, 1.2),
    num_requests=20,
    scale=1.0,
    kv_cache_tokens=100_000,
    max_num_seqs=64,
)
ON_CPU = Setup(
    models=tuple(TOY),
    device="cpu",
    dtype="float32",
    batches=(1, 2, 4),
    contexts=(128, 256),
    prefills=(64, 128),
    token_budgets=(128, 512),
    rates=(20.0,),
    num_requests=6,
    scale=0.05,
    kv_cache_tokens=4096,
    max_num_seqs=8,
)


class Run:
    """The parts of one model, what they found, and how much time is left."""

    def __init__(self, setup: Setup, out: Path, seconds: float) -> None:
        self.setup, self.out = setup, out
        self._ends_at = time.monotonic() + seconds
        self.results: dict[str, Any] = {"machine": machine(setup.device), "setup": dataclasses.asdict(setup)}

    @property
    def left_s(self) -> float:
        return self._ends_at - time.monotonic()

    def note(self, model: str, **found: Any) -> None:
        """Keeps what was found, on disk too: the run may be cut off."""
        self.results.setdefault(model, {}).update(found)
        (self.out / "results.json").write_text(json.dumps(self.results, indent=1))
        (self.out / "report.md").write_text(document(self.results))
        print(f"[{self.left_s:.0f} s left] {model}: {', '.join(found)}", flush=True)

    def has(self, seconds: float, what: str) -> bool:
        if self.left_s < seconds:
            print(f"{what}: left out, {self.left_s:.0f} s are left", flush=True)
            return False
        return True

    def tried(self, name: str, part: Callable[[], T]) -> T | None:
        """What `part` returns; None if it fails, which must not cost the parts after it."""
        try:
            return part()
        except Exception:
            traceback.print_exc()
            failures = self.results.get(name, {}).get("failures", [])
            self.note(name, failures=[*failures, traceback.format_exc()])
            return None

    def checks(self) -> None:
        """Part 1."""
        # A machine without a network may lack what other tests import.
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default"]
        command += ["--continue-on-collection-errors", "tests/backend"]
        if importlib.util.find_spec("nixl_cu13") is None:
            command += ["--ignore", "tests/backend/transfer"]
        log = self.out / "checks.log"
        with log.open("w") as file:  # no pipe: what was said before the time was up is wanted too
            try:
                limit_s = max(_CHECKS_SHARE * self.left_s, 10)
                code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=limit_s).returncode
            except subprocess.TimeoutExpired:
                code = None
        self.note("checks", exit_code=code, output=log.read_text(errors="replace")[-6000:])

    def start(self, name: str) -> Engine:
        """An engine of that shape, its graphs recorded."""
        setup, started = self.setup, time.monotonic()
        model = random_model(name, getattr(torch, setup.dtype), torch.device(setup.device))
        config = EngineConfig(
            Path(name),
            SchedulerConfig(TOKEN_BUDGET, setup.max_num_seqs),
            kv_cache_tokens=setup.kv_cache_tokens,
            dtype=setup.dtype,
            device=setup.device,
            async_scheduling=True,
        )
        engine = Engine.of(model, config)
        self.note(name, start_s=time.monotonic() - started)
        return engine

    def step_times(self, name: str, engine: Engine) -> None:
        """Part 2."""
        setup, times = self.setup, []
        for context in setup.contexts:
            for batch in setup.batches:
                if batch * context <= setup.kv_cache_tokens:
                    times.append(decode_time(engine, batch, context))
            self.note(name, step_times=[dataclasses.asdict(of) for of in times])
        times += [prefill_time(engine, length) for length in setup.prefills]
        write_csv(self.out / f"latency-{name}.csv", times)
        self.note(name, step_times=[dataclasses.asdict(of) for of in times])
        waiting = with_budget(engine, TOKEN_BUDGET, setup.max_num_seqs, runs_ahead=False)
        on_device = engine.runner.on_device
        assert on_device is not None
        for what, graphs in (("graphs, each step waited for", on_device.graphs), ("no graphs either", None)):
            recorded, on_device.graphs = on_device.graphs, graphs
            try:
                slower = [decode_time(waiting, batch, setup.contexts[0]) for batch in setup.batches]
            finally:
                on_device.graphs = recorded
            self.note(name, **{what: [dataclasses.asdict(of) for of in slower]})

    def busy(self, name: str, engine: Engine) -> None:
        """Part 3."""
        shares = {}
        for batch in (self.setup.batches[0], self.setup.batches[len(self.setup.batches) // 2]):
            config = engine.runner.model.config
            requests = [request(f"busy-{i}", config, 512, BLOCK_LENGTH, BLOCK_LENGTH) for i in range(batch)]
            for of in requests:
                engine.scheduler.add(of)
            for _ in range(6):
                engine.step()
            try:
                shares[batch] = busy_share(lambda: [engine.step() for _ in range(12)])
            finally:
                clear(engine, requests)
        self.note(name, busy_shares=shares)

    def serving(self, name: str, engine: Engine) -> None:
        """Part 4: one request at a time first, to know what each takes."""
        setup = self.setup
        mean_steps = MEAN_STEPS[next(kind for kind in MEAN_STEPS if kind in name)]
        runs: list[dict[str, Any]] = []
        loads = {
            rate: jobs("sharegpt", rate, setup.num_requests, mean_steps, seed=1, scale=setup.scale)
            for rate in setup.rates
        }
        any_load = loads[setup.rates[0]]
        if not self.has(3.0 * len(any_load) * setup.scale, f"{name}: serving"):
            return
        one = with_budget(engine, 1, max_num_seqs=1)
        services = [serve(one, [dataclasses.replace(job, arrival=0.0)]).seconds for job in any_load]
        self.note(name, service_s=services)
        for rate, load in loads.items():
            for token_budget in setup.token_budgets:
                if not self.has(2 * load[-1].arrival, f"{name}: {rate:g} requests/s, budget {token_budget}"):
                    continue
                served = serve(with_budget(engine, token_budget, setup.max_num_seqs), load)
                runs.append(
                    {
                        "rate": rate,
                        "token_budget": token_budget,
                        "mean_s": served.mean,
                        "worst_s": max(served.latencies),
                        "one_at_a_time_rate": rate_at_latency(load, services, served.mean),
                    }
                )
                self.note(name, serving=runs)


def machine(device: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "device": device}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "memory_gb": f"{properties.total_memory / 1e9:.0f}"}
    return found


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the report, results and tables")
    parser.add_argument("--seconds", type=_seconds, default=470.0, help="time for all of it")
    parser.add_argument("--toy", action="store_true", help="small models on the CPU: a try")
    parser.add_argument("--model", action="append", choices=list(shapes()), help="only this one; may be repeated")
    args = parser.parse_args()
    setup = ON_CPU if args.toy else FULL
    if args.model:
        setup = dataclasses.replace(setup, models=tuple(args.model))
    if setup.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --toy tries all of this on a CPU")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    torch.set_num_threads(1)
    run = Run(setup, args.out, args.seconds)
    if not args.toy:
        run.tried("checks", run.checks)
    engines = {name: run.tried(name, partial(run.start, name)) for name in setup.models}
    for part in (run.step_times, run.busy, run.serving):
        for name, engine in engines.items():
            if engine is not None:
                run.tried(name, partial(part, name, engine))
    print((args.out / "report.md").read_text())


if __name__ == "__main__":
    main()
