"""Offline tokens/s beside two simpler ways to batch: `python -m benchmarks.throughput`.

One run answers the same requests three ways, through one engine and one model: one request at a time (as
Fast-dLLM's script does), synchronized batches (filled to a fixed size, the next when the last answer is
complete) and `sangam generate`'s own scheduling. Goals at 16 in flight: 4 times the first, 1.5 times the second.

Seconds are CPU time of one thread, so that others on the machine do not count; the ways take turns, the best turn
of each counts, and all must give the same tokens. `us/row` is the model's time over all packed tokens, `in
model` its share of the whole. `steps` are forwards: where a step cost the same whatever is in it, their ratio would
be the speed-up. `room` is what any schedule could gain if every row were computed at the speed of a large matrix
product and nothing else took time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from backend.attention.kv_cache import KVCache
from backend.core.page_pool import PagePool
from backend.core.scheduler import SchedulerConfig
from backend.core.synchronized_scheduler import SynchronizedSchedulerConfig
from backend.engine.engine import AnySchedulerConfig, Engine, new_scheduler
from backend.engine.model_runner import ModelRunner
from backend.models.layers import Transformer
from benchmarks.report import markdown
from benchmarks.throughput_cases import Case, demo_case, larger_case
from components.config import DEMO_MODELS
from components.offline import LOOK_AHEAD, OfflineBatch

GOAL_IN_FLIGHT, GOAL_SERIAL, GOAL_SYNCHRONIZED = 16, 4.0, 1.5
TOKEN_BUDGET, PAGE_SIZE = 2048, 16
SERIAL, SYNCHRONIZED, SANGAM = "one at a time", "synchronized", "sangam"


class Clock:
    """Adds up the time spent in a model and the rows that it was given."""

    def __init__(self, model: Transformer) -> None:
        self.seconds, self.num_rows = 0.0, 0
        forward, logits = model.forward, model.logits
        model.forward = self._timed(forward)  # type: ignore[method-assign]
        model.logits = self._timed(logits)  # type: ignore[method-assign]

    def _timed(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def timed(rows: Tensor, *rest: object) -> Tensor:
            started = time.process_time()
            out = function(rows, *rest)
            self.seconds += time.process_time() - started
            self.num_rows += len(rows) if rest else 0  # the head's rows have been counted by the forward
            return out

        return timed


@dataclass(frozen=True)
class Run:
    """One way's answers and what they took; `tokens` by request."""

    seconds: float
    model_s: float
    num_rows: int
    num_steps: int
    num_forwards: int
    tokens: dict[int, tuple[int, ...]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def rate(self) -> float:
        """Tokens returned per second of CPU time."""
        return self.num_tokens / self.seconds


def answer(case: Case, clock: Clock, cache: KVCache, tokenizer: Tokenizer, config: AnySchedulerConfig) -> Run:
    """All of a case's requests in one way."""
    pool = PagePool(cache.scratch_slot // PAGE_SIZE, PAGE_SIZE)
    engine = Engine(ModelRunner(case.model, cache), new_scheduler(config, pool, case.model.config.logits_shift))
    batch = OfflineBatch(engine, tokenizer, list(case.jobs()), LOOK_AHEAD * 2)
    tokens = {}
    clock.seconds, clock.num_rows = 0.0, 0
    started = time.process_time()
    while (ended := batch.step()) is not None:
        for done in ended:
            if done.error:
                raise RuntimeError(f"request {done.index}: {done.error}")
            tokens[done.index] = tuple(done.tokens)
    seconds = time.process_time() - started
    return Run(seconds, clock.seconds, clock.num_rows, batch.num_steps, batch.num_forwards, tokens)


def ways(in_flight: int) -> dict[str, AnySchedulerConfig]:
    return {
        SERIAL: SchedulerConfig(TOKEN_BUDGET, 1),
        SYNCHRONIZED: SynchronizedSchedulerConfig(in_flight, 0.0),
        SANGAM: SchedulerConfig(TOKEN_BUDGET, in_flight),
    }


def measure(case: Case, in_flights: Sequence[int], repeats: int) -> dict[tuple[str, int], Run]:
    """(way, in flight) -> its best run of `repeats`, the ways taking turns.

    Raises:
        AssertionError: two ways gave different tokens.
    """
    shape = case.model.config
    longest = max(job.request.sequence_length for job in case.jobs())
    num_pages = max(in_flights) * -(-longest // PAGE_SIZE)  # seats bound what is in flight, not pages
    cache = KVCache(
        shape.num_layers, num_pages, PAGE_SIZE, shape.num_kv_heads, shape.head_dim, torch.float32, torch.device("cpu")
    )
    tokenizer = Tokenizer.from_file(str(DEMO_MODELS["demo"] / "tokenizer.json"))
    clock = Clock(case.model)
    todo = {(SERIAL, 1): ways(1)[SERIAL]}
    todo |= {(way, n): ways(n)[way] for n in in_flights for way in (SYNCHRONIZED, SANGAM)}
    best: dict[tuple[str, int], Run] = {}
    for _ in range(repeats):
        for key, config in todo.items():
            run = answer(case, clock, cache, tokenizer, config)
            if run.tokens != best.get((SERIAL, 1), run).tokens:
                raise AssertionError(f"{key} gave other tokens than one request at a time")
            if key not in best or run.seconds < best[key].seconds:
                best[key] = run
    return best


def table(best: dict[tuple[str, int], Run]) -> str:
    """Tokens returned per second of CPU time and why, a row per way and number in flight."""
    rows = [["way", "in flight", "tokens/CPU s", "to one at a time", "to synchronized", "steps", "requests/step"]]
    rows[0] += ["us/row", "in model"]
    serial = best[SERIAL, 1]
    for (way, n), run in best.items():
        other = best[SYNCHRONIZED, n] if way == SANGAM else None
        rows.append(
            [
                way,
                str(n),
                f"{run.rate:,.1f}",
                f"{run.rate / serial.rate:.2f}",
                f"{run.rate / other.rate:.2f}" if other else "",
                str(run.num_steps),
                f"{run.num_forwards / run.num_steps:.1f}",
                f"{run.model_s / run.num_rows * 1e6:.1f}",
                f"{run.model_s / run.seconds:.0%}",
            ]
        )
    return markdown(rows)


def matrix_flops() -> float:
    """Floating point operations a second of a large matrix product, the best of some."""
    size = 1024
    a, b = torch.randn(size, size), torch.randn(size, size)
    seconds = []
    for _ in range(10):
        started = time.process_time()
        torch.mm(a, b)
        seconds.append(time.process_time() - started)
    return 2 * size**3 / min(seconds)


def room(serial: Run, model: Transformer, flops: float) -> float:
    """How much faster than `serial` its matrix products alone would be, all at `flops`; attention is free."""
    per_row = 2 * sum(weight.numel() for weight in model.blocks.parameters() if weight.dim() == 2)
    return serial.seconds * flops / (serial.num_rows * per_row)


def verdict(best: dict[tuple[str, int], Run]) -> str:
    """The figures beside their goals."""
    if (SANGAM, GOAL_IN_FLIGHT) not in best:
        return ""
    serial, ours = best[SERIAL, 1], best[SANGAM, GOAL_IN_FLIGHT]
    synchronized = best[SYNCHRONIZED, GOAL_IN_FLIGHT]
    lines = []
    for name, other, goal in ((SERIAL, serial, GOAL_SERIAL), (SYNCHRONIZED, synchronized, GOAL_SYNCHRONIZED)):
        ratio = ours.rate / other.rate
        lines.append(
            f"{'met' if ratio >= goal else 'MISSED'}: {ratio:.2f} x {name} (goal {goal:g}); "
            f"forward alone {other.model_s / ours.model_s:.2f} x, steps {other.num_steps / ours.num_steps:.1f} x"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("demo", "larger"), default="demo", help="(%(default)s)")
    parser.add_argument("--requests", type=int, default=192, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--steps-per-block", type=int, default=0, metavar="K", help="forwards per block; 0: by confidence (%(default)s)"
    )
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4, 16, 64], metavar="N")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    make = demo_case if arguments.model == "demo" else larger_case
    case = make(arguments.requests, arguments.steps_per_block, arguments.seed)
    best = measure(case, arguments.in_flight, arguments.repeats)
    serial = best[SERIAL, 1]
    print(f"{case.name}; {len(serial.tokens)} requests, {serial.num_tokens} tokens, ", end="")
    print(f"{serial.num_tokens / serial.num_forwards:.2f} tokens per forward, the same in every way\n")
    print(f"{table(best)}\n{verdict(best)}")
    print(f"room: {room(serial, case.model, matrix_flops()):.1f} x one at a time")


if __name__ == "__main__":
    main()
