"""What a simulation is asked: lengths and arrival times, without contents."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks import arrivals
from benchmarks.lengths import TRACES, Length
from benchmarks.workload import trace_lengths

Mode = Literal["end of text", "fixed length", "whole blocks"]
DEFAULT_QPS = 7.5
Process = Literal["poisson", "gamma", "bursts", "closed"]


@dataclass(frozen=True)
class Workload:
    """Requests in order of their number.

    Attributes:
        arrivals_s: when each is due, ascending; empty in a closed loop.
        num_clients: of a closed loop: each asks when its last answer has come; 0 in an open one.
        canvas_length: masks after every prompt; None: its output in whole blocks.
        mode: where answers end, which the output lengths of a trace say:
            "end of text": a token of its own after so many, if the canvas holds it;
            "fixed length": after exactly so many, the last block is left as soon as it has them (`ignore_eos`);
            "whole blocks": as "fixed length", but in whole blocks, all denoised to the end, as the paper's
            prototype does, which stops for nothing else.
        seed: of how many forwards each block takes.
    """

    name: str
    lengths: tuple[Length, ...]
    arrivals_s: tuple[float, ...] = ()
    num_clients: int = 0
    canvas_length: int | None = None
    block_length: int = 32
    mode: Mode = "whole blocks"
    seed: int = 1

    def __post_init__(self) -> None:
        if bool(self.arrivals_s) == bool(self.num_clients):
            raise ValueError("arrivals_s or num_clients: one of them")
        if self.arrivals_s and len(self.arrivals_s) != len(self.lengths):
            raise ValueError(f"{len(self.arrivals_s)} arrivals of {len(self.lengths)} requests")
        longest = max(map(self.num_tokens, self.lengths), default=0)
        if self.canvas_length is not None and longest > self.canvas_length:
            raise ValueError(f"an output of {longest} tokens does not fit the canvas of {self.canvas_length}")

    def num_tokens(self, length: Length) -> int:
        """Tokens of the answer."""
        return self._whole(length.num_output_tokens) if self.mode == "whole blocks" else length.num_output_tokens

    def canvas_of(self, length: Length) -> int:
        return self.canvas_length or self._whole(length.num_output_tokens + (self.mode == "end of text"))

    def _whole(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_length) * self.block_length

    @property
    def achieved_rate(self) -> float:
        """Arrivals per second up to the last one: what the arrival process really did."""
        return len(self.arrivals_s) / self.arrivals_s[-1] if self.arrivals_s and self.arrivals_s[-1] else 0.0


def draw(
    trace: str,
    num_requests: int,
    seed: int,
    *,
    qps: float | None = None,
    process: Process = "poisson",
    cv: float = 2.0,
    burst_size: int = 8,
    num_clients: int = 8,
    replay: Path | None = None,
    mode: Mode = "whole blocks",
    canvas_length: int | None = None,
    block_length: int = 32,
    scale: float = 1.0,
    max_total: int | None = None,
) -> Workload:
    """A workload from a trace and an arrival process; the same requests for one seed at every rate.

    Args:
        trace, scale, max_total: see `trace_lengths`.
        qps: requests per second; None: a replay's own, else `DEFAULT_QPS`.
        process, cv, burst_size, num_clients: see `benchmarks.arrivals`.
        replay: a file of arrival times instead. If it is the trace's own, each row is one request.
        canvas_length: None: the paper's for its traces (scaled), else each output's own.

    Raises:
        ValueError: no such trace, rate or process; an output longer than the canvas.
        OSError: a file cannot be read.
    """
    in_order = replay is not None and replay == Path(trace)
    if in_order and max_total:
        raise ValueError("max_total would leave out lengths but not their arrivals")
    drawn = trace_lengths(trace, seed, scale=scale, max_total=max_total, in_order=in_order)
    lengths = tuple(itertools.islice(drawn, num_requests))
    if canvas_length is None and trace in TRACES:
        canvas_length = -(-int(TRACES[trace].canvas_length * scale) // block_length) * block_length
    times: Iterator[float]
    name = Path(trace).stem
    if replay is not None:
        due = tuple(arrivals.replay(replay, qps)[:num_requests])
        return Workload(
            f"{name} as {replay.name}", lengths[: len(due)], due, 0, canvas_length, block_length, mode, seed
        )
    qps = DEFAULT_QPS if qps is None else qps
    if process == "poisson":
        times = arrivals.poisson(qps, seed)
    elif process == "gamma":
        times = arrivals.gamma(qps, cv, seed)
    elif process == "bursts":
        times = arrivals.bursts(qps, burst_size, seed)
    elif process == "closed":
        return Workload(
            f"{name}, {num_clients} clients", lengths, (), num_clients, canvas_length, block_length, mode, seed
        )
    else:
        raise ValueError(f"process={process!r} is not known; allowed: poisson, gamma, bursts, closed")
    due = tuple(itertools.islice(times, num_requests))
    return Workload(f"{name} at {qps:g}/s", lengths, due, 0, canvas_length, block_length, mode, seed)
