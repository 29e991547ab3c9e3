"""A sweep's results as Markdown tables: one for latencies against load, one for where the time went."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.points import Measured, noise
from benchmarks.scrape import PHASES
from benchmarks.variants import Variant

OVERFLOWS = "sangam_router_overflows_total"
CPU_COLUMNS = {
    "prefill workers": ("prefill workers",),
    "colocated workers": ("colocated workers",),
    "rest of the graph": ("router", "frontend", "NATS", "other"),
    "load generator": ("client",),
    "others": ("others",),
}
"""What a table shows -> the kinds of processes in it."""
LATENCIES = (
    "load",
    "variant",
    "requests",
    "achieved",
    "completed",
    "mean s",
    "p99 s",
    "goodput",
    "errors",
    "right",
    "differing",
)


def document(
    setup: Mapping[str, Any], num_processes: Mapping[str, int], compared: Sequence[Variant], results: Sequence[Measured]
) -> str:
    """The whole report: what was compared and how, both tables, what the figures cannot say."""
    num_cores, num_workers = setup["num_cores"], setup["prefill"] + setup["colocated"]
    lines = [f"- {v.name}: {v.about}; {num_processes.get(v.name, '?')} processes" for v in compared]
    asked = f"{setup['requests']}" + (f" x {setup['length_scale']:g}" if setup["requests"] != "tasks" else "")
    steps = setup.get("steps_per_block")
    unmasking = f"{steps} forwards per block" if steps else "unmasking by threshold"
    return f"""{num_workers} workers in every variant:

{chr(10).join(lines)}

Requests: {asked}, {setup["mode"]}, {unmasking}, arrivals {setup["arrivals"]}, {setup["duration_s"]:g} s per run, \
seeds {", ".join(map(str, setup["seeds"]))}. Latency counts from when a request was due; goodput: answered within \
{setup["slo_s"]:g} s.

{latency_table(results)}
Load, achieved (what the arrival process really did), completed and goodput are requests/s. `differing`: answers that
are not those of the first variant to the same questions.

{breakdown_table(results)}
{noise_line(results)}

{num_cores} cores are shared by {num_workers} workers, router, frontend, NATS and the load generator.{_limits(setup)}
"""


def _limits(setup: Mapping[str, Any]) -> str:
    if setup["prefill"] + setup["colocated"] < setup["num_cores"]:
        return ""
    return (
        " There are no more cores than workers: a worker more adds no hardware, the pools take processor time from"
        "\neach other, and the ratios between variants are not those of a machine with an accelerator per worker."
    )


def latency_table(results: Sequence[Measured]) -> str:
    """Latency, rates, errors and goodput per load and variant.

    Over several runs of a point: the mean of the runs' figures, and their least and most in brackets.
    """
    rows = [LATENCIES]
    for (rate, variant), runs in grouped(results).items():
        summaries = [run.summary for run in runs]
        right = [sum(counts) for counts in zip(*(c for s in summaries for c in s.correct.values()), strict=False)]
        rows.append(
            (
                f"{rate:g}",
                variant,
                str(sum(s.num_requests for s in summaries)),
                _number([s.achieved_rate for s in summaries]),
                _number([s.completed_rate for s in summaries]),
                _spread([s.latency.mean for s in summaries]),
                _spread([s.latency.p99 for s in summaries]),
                _number([s.goodput for s in summaries]),
                _errors(s.errors for s in summaries),
                f"{right[0]}/{right[1]}" if right else "-",
                str(sum(run.num_differing for run in runs)),
            )
        )
    return markdown(rows)


def breakdown_table(results: Sequence[Measured]) -> str:
    """Milliseconds per phase of a mean request, by the graph's own metrics, and who used the processors."""
    is_per_block = any(run.breakdown.is_per_block for run in results)
    phases = [phase for phase in PHASES if any(phase in run.breakdown.phase_s for run in results)]
    has_overflows = any(OVERFLOWS in run.breakdown.counters for run in results)
    head = ["load", "variant", *(f"{phase.replace('_', ' ')} ms" for phase in phases)]
    head += ([] if is_per_block else ["rest ms"]) + (["overflows"] if has_overflows else [])
    rows = [[*head, *(f"CPU: {shown}" for shown in CPU_COLUMNS)]]
    for (rate, variant), runs in grouped(results).items():
        row = [f"{rate:g}", variant]
        row += [_milliseconds([run.breakdown.phase_s.get(phase, 0.0) for run in runs]) for phase in phases]
        if not is_per_block:
            row.append(_milliseconds([rest_s(run) for run in runs]))
        if has_overflows:
            row.append(str(round(sum(run.breakdown.counters.get(OVERFLOWS, 0) for run in runs))))
        for kinds in CPU_COLUMNS.values():
            row.append(_number([sum(run.cores.get(kind, 0.0) for kind in kinds) for run in runs]))
        rows.append(row)
    unit = "block, as the workers measure it" if is_per_block else "request, as the router measures it"
    return f"Phases of a mean {unit}; CPU in cores.\n\n{markdown(rows)}"


def rest_s(run: Measured) -> float:
    """Of a mean request's latency, what is in no phase: frontend, router, the way there and back."""
    return max(run.summary.latency.mean - sum(run.breakdown.phase_s.values()), 0.0)


def noise_line(results: Sequence[Measured]) -> str:
    """How much one run's figure may be off."""
    spread, num_seeds = noise(results), len({run.point.seed for run in results})
    if spread is not None:
        return f"Noise: the same point run again gave a mean latency up to {spread:.0%} apart."
    if num_seeds > 1:
        return f"Noise: brackets are the least and the most of {num_seeds} seeds, which are {num_seeds} workloads."
    return "Noise: unknown, every point was run once."


def grouped(results: Iterable[Measured]) -> dict[tuple[float, str], list[Measured]]:
    """(load, variant) -> its runs; loads ascending, variants as they first come."""
    results = list(results)
    names = list(dict.fromkeys(run.point.variant for run in results))
    found: dict[tuple[float, str], list[Measured]] = {}
    for run in sorted(results, key=lambda run: (run.point.rate, names.index(run.point.variant))):
        found.setdefault((run.point.rate, run.point.variant), []).append(run)
    return found


def _errors(all_errors: Iterable[Mapping[str, int]]) -> str:
    totals: dict[str, int] = {}
    for errors in all_errors:
        for name, count in errors.items():
            totals[name] = totals.get(name, 0) + count
    return ", ".join(f"{count} {name}" for name, count in totals.items()) or "0"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _number(values: Sequence[float]) -> str:
    return f"{_mean(values):.2f}"


def _milliseconds(values: Sequence[float]) -> str:
    return f"{1e3 * _mean(values):.1f}"


def _spread(values: Sequence[float], shown: Callable[[float], str] = "{:.2f}".format) -> str:
    mean = shown(_mean(values))
    return mean if len(values) == 1 else f"{mean} ({shown(min(values))} to {shown(max(values))})"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Aligned also as plain text."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"
