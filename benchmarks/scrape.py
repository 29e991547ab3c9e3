"""What a graph's own metrics (Prometheus) say about a run: scraped before and after, subtracted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Sample = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and its labels, sorted."""

PHASES = ("prefill_queue", "prefill", "decode_queue", "transfer", "decode")
ROUTER_PHASES = "sangam_router_phase_seconds"
WORKER_PHASES = "sangam_worker_phase_seconds"
FROM_WORKER = {"queue": "prefill_queue", "prefill": "prefill", "denoising": "decode"}
"""A worker's names for what the router calls a phase."""


def parse(text: str) -> dict[Sample, float]:
    """The samples of one /metrics page, without when they were created."""
    samples: dict[Sample, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def added(pages: Iterable[Mapping[Sample, float]]) -> dict[Sample, float]:
    """The sum over processes: what identical workers did together."""
    total: dict[Sample, float] = {}
    for page in pages:
        for sample, value in page.items():
            total[sample] = total.get(sample, 0.0) + value
    return total


def increase(before: Mapping[Sample, float], after: Mapping[Sample, float]) -> dict[Sample, float]:
    """How far counters got. One that fell belongs to a process that started again: it counts from 0."""
    return {
        sample: value - before.get(sample, 0.0) if value >= before.get(sample, 0.0) else value
        for sample, value in after.items()
    }


@dataclass(frozen=True)
class Breakdown:
    """Where the time of a run's requests went, by the graph's own account.

    Attributes:
        phase_s: seconds per phase, of a mean request. A phase that no request had is missing.
        is_per_block: the router does not measure phases; these are the workers', of a mean block.
        counters: what else happened, by metric name: overflows, retries, bytes moved between workers.
    """

    phase_s: Mapping[str, float] = field(default_factory=dict)
    is_per_block: bool = False
    counters: Mapping[str, float] = field(default_factory=dict)


COUNTERS = (
    "sangam_router_overflows_total",
    "sangam_router_retries",
    "sangam_router_blocks_total",
    "sangam_worker_transfer_bytes_total",
    "sangam_worker_num_steps_total",
    "sangam_worker_num_prefill_tokens_total",
    "sangam_worker_num_denoising_tokens_total",
)


def breakdown(increases: Mapping[Sample, float]) -> Breakdown:
    """From the increases of the router's and all workers' metrics over a run."""
    counters: dict[str, float] = {}
    for (name, _), value in increases.items():
        if name in COUNTERS:
            counters[name] = counters.get(name, 0.0) + value
    totals = _phase_totals(increases, ROUTER_PHASES)
    if totals:
        # Over the requests, not over a phase's own count: a phase half of them had counts half.
        num_requests = max(count for _, count in totals.values())
        phases = {phase: seconds / num_requests for phase, (seconds, count) in totals.items()}
        return Breakdown(phases, False, counters)
    totals = _phase_totals(increases, WORKER_PHASES)
    phases = {FROM_WORKER.get(phase, phase): seconds / count for phase, (seconds, count) in totals.items()}
    return Breakdown(phases, True, counters)


def _phase_totals(increases: Mapping[Sample, float], metric: str) -> dict[str, tuple[float, float]]:
    """phase -> seconds and observations, of the phases that were observed."""
    totals: dict[str, list[float]] = {}
    for (name, labels), value in increases.items():
        phase = dict(labels).get("phase")
        if phase is not None and name in (f"{metric}_sum", f"{metric}_count"):
            totals.setdefault(phase, [0.0, 0.0])[name.endswith("_count")] += value
    order = {phase: place for place, phase in enumerate(dict.fromkeys((*PHASES, *totals)))}
    ordered = sorted(totals.items(), key=lambda item: order[item[0]])
    return {phase: (seconds, count) for phase, (seconds, count) in ordered if count > 0}
