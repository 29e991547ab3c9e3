"""What a run of the load generator leaves: a table on the terminal, a JSON file, a CSV file."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.metrics import Outcome, Summary
from benchmarks.points import Measured

COLUMNS = (
    "index", "task", "intended_s", "sent_s", "latency_s", "first_token_latency_s", "max_commit_gap_s",
    "num_prompt_tokens", "num_tokens", "finish_reason", "is_correct", "error",
)  # fmt: skip


def print_summary(summary: Summary, setup: Mapping[str, Any], console: Console | None = None) -> None:
    console = console or Console(soft_wrap=True, highlight=False)
    times = Table("seconds", "mean", "p50", "p90", "p99", "max", box=None, header_style="dim", pad_edge=False)
    rows = {"end to end": summary.latency, "first tokens": summary.first_token, "between commits": summary.commit_gap}
    for name, distribution in {**rows, "sent late by": summary.lateness}.items():
        times.add_row(name, *(f"{value:.3f}" for value in dataclasses.astuple(distribution)))
    errors = ", ".join(f"{count} {name}" for name, count in summary.errors.items()) or "none"
    console.print(
        f"{summary.num_requests} requests in {summary.duration_s:g} s ({setup['mode']}, seed {setup['seed']}): "
        f"{summary.num_completed} answered, errors: {errors}"
    )
    console.print(
        f"achieved rate {summary.achieved_rate:.2f}/s, completed {summary.completed_rate:.2f}/s, "
        f"goodput {summary.goodput:.2f}/s within {setup['slo_s']:g} s, "
        f"{summary.tokens_per_s:.0f} tokens/s returned ({summary.mean_prompt_tokens:.0f} prompt and "
        f"{summary.mean_tokens:.0f} returned per request)"
    )
    if summary.correct:
        console.print("right answers: " + ", ".join(f"{t} {ok}/{n}" for t, (ok, n) in summary.correct.items()))
    console.print(times)


def write_run(folder: Path, setup: Mapping[str, Any], summary: Summary, outcomes: Sequence[Outcome]) -> None:
    """Writes summary.json and requests.csv into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "summary.json", {"setup": dict(setup), "summary": dataclasses.asdict(summary)})
    with (folder / "requests.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        rows.writerows(_row(outcome) for outcome in outcomes)


def write_points(path: Path, measured: Sequence[Measured]) -> None:
    """A sweep as CSV: one row per run, one column per figure."""
    rows = [_flat(run) for run in measured]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, restval="")
        table.writeheader()
        table.writerows(rows)


def _flat(run: Measured) -> dict[str, object]:
    summary = run.summary
    row: dict[str, object] = dataclasses.asdict(run.point)
    for name, value in dataclasses.asdict(summary).items():
        if isinstance(value, int | float):
            row[name] = value
        elif name in ("latency", "first_token", "commit_gap", "lateness"):
            row |= {f"{name}_{figure}_s": seconds for figure, seconds in value.items()}
    row["num_errors"] = sum(summary.errors.values())
    row["num_correct"] = sum(right for right, _ in summary.correct.values())
    row["num_checked"] = sum(checked for _, checked in summary.correct.values())
    row["num_differing"] = run.num_differing
    row |= {f"{phase}_s": seconds for phase, seconds in run.breakdown.phase_s.items()}
    row |= run.breakdown.counters
    row |= {f"cores_{kind.replace(' ', '_')}": cores for kind, cores in run.cores.items()}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}


def _row(outcome: Outcome) -> Iterable[object]:
    derived = {"max_commit_gap_s": max(outcome.commit_gaps_s, default=None)}
    for column in COLUMNS:
        value = derived.get(column) if column in derived else getattr(outcome, column)
        yield "" if value is None else round(value, 6) if isinstance(value, float) else value


def write_json(path: Path, document: Any) -> None:
    """Numbers to 6 digits; what does not exist (nan) is null, as JSON has no name for it."""
    path.write_text(json.dumps(_plain(document), indent=1) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
