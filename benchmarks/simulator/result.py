"""What a simulation gave: one row per request, and what the workers did."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backend.core.step import PHASES
from benchmarks.metrics import Distribution, Objective, Outcome, Summary, summarize
from benchmarks.simulator.config import SimulatorConfig
from benchmarks.simulator.flight import Trip
from benchmarks.simulator.graph import Graph
from benchmarks.simulator.worker import SimWorker
from benchmarks.simulator.workload import Workload

Column = npt.NDArray[np.float64]

COLUMNS = (
    "due_s", "latency_s", "first_token_latency_s", *(f"{phase}_s" for phase in PHASES),
    "num_prompt_tokens", "num_tokens", "num_blocks", "num_steps",
)  # fmt: skip


@dataclass(frozen=True)
class PoolUse:
    """What the workers of one pool did up to the last arrival, or in a closed loop to the end.

    Attributes:
        utilization: part of the time spent in steps, the mean over the workers.
        num_refreshes: prefills in the middle of blocks, which are not in num_prefills.
        mean_batch: decodes per step.
    """

    num_workers: int
    utilization: float
    num_steps: int
    num_prefills: int
    num_prefill_tokens: int
    num_refreshes: int
    mean_batch: float


@dataclass(frozen=True)
class Result:
    """Attributes:
    name: of the configuration.
    workload: its name.
    mode: see `Workload`; results of different modes do not compare.
    requests: per column of `COLUMNS` one number per request, in order of their number. Phases are as the
        live router's: summed over a request's blocks, without the time of messages.
    duration_s: for how long requests were due; in a closed loop the whole run.
    commit_gap: between one arrival of committed tokens at a client and the next.
    pools: "prefill" and "colocated".
    num_overflows: prefills that went to a colocated worker because the prefill pool was full.
    """

    name: str
    workload: str
    mode: str
    requests: Mapping[str, Column]
    duration_s: float
    commit_gap: Distribution
    pools: Mapping[str, PoolUse]
    num_overflows: int

    @property
    def latency(self) -> Distribution:
        return self.of("latency_s")

    def of(self, column: str) -> Distribution:
        return Distribution.of(self.requests[column])

    def phase(self, name: str) -> Distribution:
        """Of one of `PHASES`."""
        return self.of(f"{name}_s")

    @property
    def mean_steps_per_block(self) -> float:
        return float(self.requests["num_steps"].sum() / self.requests["num_blocks"].sum())

    def outcomes(self) -> list[Outcome]:
        """The requests as a client would have seen them."""
        columns = (self.requests[name].tolist() for name in COLUMNS)
        rows = (dict(zip(COLUMNS, row, strict=True)) for row in zip(*columns, strict=True))
        return [
            Outcome(
                index=index,
                task=self.workload,
                intended_s=row["due_s"],
                sent_s=row["due_s"],
                finished_s=row["due_s"] + row["latency_s"],
                first_token_s=row["due_s"] + row["first_token_latency_s"],
                num_prompt_tokens=int(row["num_prompt_tokens"]),
                num_tokens=int(row["num_tokens"]),
            )
            for index, row in enumerate(rows)
        ]

    def summary(self, objective: Objective) -> Summary:
        """The figures of a run, as the load generator gives them for a live one."""
        return dataclasses.replace(summarize(self.outcomes(), self.duration_s, objective), commit_gap=self.commit_gap)

    def write_csv(self, path: Path) -> None:
        """One row per request, one column per figure."""
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(COLUMNS)
            rows.writerows(zip(*(self.requests[name].round(6).tolist() for name in COLUMNS), strict=True))

    def save(self, path: Path) -> None:
        """As a numpy archive, which `load` reads."""
        rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "requests"}
        rest["commit_gap"] = dataclasses.asdict(self.commit_gap)
        rest["pools"] = {name: dataclasses.asdict(use) for name, use in self.pools.items()}
        with path.open("wb") as file:
            arrays: dict[str, Any] = {"rest": np.array(json.dumps(rest)), **self.requests}
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> Result:
        with np.load(path, allow_pickle=False) as archive:
            requests = {name: archive[name] for name in COLUMNS}
            rest: dict[str, Any] = json.loads(str(archive["rest"]))
        rest["commit_gap"] = Distribution(**rest["commit_gap"])
        rest["pools"] = {name: PoolUse(**use) for name, use in rest["pools"].items()}
        return cls(requests=requests, **rest)


def collect(config: SimulatorConfig, workload: Workload, trips: Sequence[Trip], graph: Graph) -> Result:
    rows = [
        (
            trip.due_s,
            trip.finished_s - trip.due_s,
            (trip.first_token_s or trip.finished_s) - trip.due_s,
            *trip.seconds,
            len(trip.prompt),
            trip.num_tokens,
            len(trip.blocks),
            trip.num_steps,
        )
        for trip in trips
    ]
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(COLUMNS))
    end_s = max((trip.finished_s for trip in trips), default=0.0)
    duration_s = workload.arrivals_s[-1] if workload.arrivals_s else end_s
    pools = {
        name: _use([worker for worker in graph.workers if worker.is_prefill == is_prefill], duration_s)
        for name, is_prefill in (("prefill", True), ("colocated", False))
    }
    return Result(
        config.name,
        workload.name,
        workload.mode,
        {name: table[:, at].copy() for at, name in enumerate(COLUMNS)},
        duration_s,
        Distribution.of(graph.commit_gaps_s),
        pools,
        graph.placer.num_overflows,
    )


def _use(workers: Sequence[SimWorker], duration_s: float) -> PoolUse:
    busy_s = sum(worker.busy_s for worker in workers)
    num_steps = sum(worker.num_steps for worker in workers)
    return PoolUse(
        num_workers=len(workers),
        utilization=busy_s / (duration_s * len(workers)) if workers and duration_s else 0.0,
        num_steps=num_steps,
        num_prefills=sum(worker.num_prefills for worker in workers),
        num_prefill_tokens=sum(worker.num_prefill_tokens for worker in workers),
        num_refreshes=sum(worker.num_refreshes for worker in workers),
        mean_batch=sum(worker.num_decodes for worker in workers) / num_steps if num_steps else 0.0,
    )
