from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from benchmarks.scrape import added, breakdown, increase, parse


def test_samples_are_parsed_added_and_subtracted() -> None:
    registry = CollectorRegistry()
    counter = Counter("sangam_worker_num_steps", "Steps", registry=registry)
    counter.inc(3)
    before = parse(generate_latest(registry).decode())
    counter.inc(4)
    after = parse(generate_latest(registry).decode())
    assert increase(added([before, before]), added([after, after])) == {("sangam_worker_num_steps_total", ()): 8.0}


def test_a_counter_that_fell_started_again() -> None:
    assert increase({("a", ()): 10.0}, {("a", ()): 4.0, ("b", ()): 1.0}) == {("a", ()): 4.0, ("b", ()): 1.0}


def test_phases_are_those_of_a_mean_request() -> None:
    registry = CollectorRegistry()
    phases = Histogram("sangam_router_phase_seconds", "Phases", ["phase"], registry=registry)
    overflows = Counter("sangam_router_overflows", "Overflows", registry=registry)
    for _ in range(4):
        phases.labels("decode").observe(2.0)
        phases.labels("prefill").observe(1.0)
    phases.labels("transfer").observe(0.4)  # one of the four had a transfer
    overflows.inc(3)
    found = breakdown(parse(generate_latest(registry).decode()))
    assert list(found.phase_s) == ["prefill", "transfer", "decode"], "in the order in which a request meets them"
    assert found.phase_s == pytest.approx({"prefill": 1.0, "transfer": 0.1, "decode": 2.0})
    assert not found.is_per_block
    assert found.counters["sangam_router_overflows_total"] == 3


def test_without_a_router_that_measures_them_phases_are_the_workers() -> None:
    registry = CollectorRegistry()
    phases = Histogram("sangam_worker_phase_seconds", "Phases", ["phase"], registry=registry)
    for phase, seconds in (("queue", 1.0), ("queue", 3.0), ("denoising", 5.0)):
        phases.labels(phase).observe(seconds)
    found = breakdown(parse(generate_latest(registry).decode()))
    assert found.phase_s == {"prefill_queue": 2.0, "decode": 5.0}
    assert found.is_per_block
