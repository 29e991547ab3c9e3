"""Prometheus metrics of one router."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backend.core.routing import HybridPolicy, Policy
from components.dispatcher import Dispatcher, Trip

_SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass
class Account:
    """How a request fared; without an outcome it did not reach its end."""

    outcome: str = "aborted"
    num_tokens: int = 0
    trip: Trip = field(default_factory=Trip)


class RouterMetrics:
    """What requests brought about, counted here, and what the dispatcher shows, read when asked for."""

    def __init__(self, dispatcher: Dispatcher, policy: Policy) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("sangam_router_requests", "Requests by outcome", ["outcome"], registry=registry)
        self.tokens = Counter("sangam_router_tokens", "Tokens returned to clients", registry=registry)
        self.blocks = Counter("sangam_router_blocks", "Blocks completed, of requests that ended", registry=registry)
        self.seconds = Histogram("sangam_router_request_seconds", "End-to-end latency", registry=registry)
        self._phases = Histogram(
            "sangam_router_phase_seconds", "Time of a request per phase, summed over its blocks", ["phase"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.in_flight = Gauge("sangam_router_tokens_in_flight", "Prompt + canvas in flight", registry=registry)
        threshold = Gauge("sangam_router_overflow_threshold", "theta of Algorithm 2, in tokens", registry=registry)
        threshold.set_function(lambda: policy.overflow_threshold if isinstance(policy, HybridPolicy) else math.inf)
        placer = dispatcher.placer
        values: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("workers", "Workers that may get a block", lambda: len(placer.prefill_pool) + len(placer.colocated_pool)),
            ("queued_blocks", "Prefills in the central queue, without a worker", lambda: placer.num_queued),
            ("pending_decodes", "Prefilled blocks without memory to be denoised", lambda: placer.num_pending_decodes),
            ("retries", "Blocks placed again after they were lost", lambda: dispatcher.num_retries),
        )
        for name, about, value in values:
            Gauge(f"sangam_router_{name}", about, registry=registry).set_function(value)
        registry.register(_DispatcherCollector(dispatcher))

    def request_done(self, account: Account, seconds: float) -> None:
        self.requests.labels(account.outcome).inc()
        self.tokens.inc(account.num_tokens)
        self.blocks.inc(len(account.trip.num_steps))
        self.seconds.observe(seconds)
        for phase, value in account.trip.seconds.items():
            self._phases.labels(phase).observe(value)

    def refresh(self, tokens_in_flight: int) -> None:
        self.in_flight.set(tokens_in_flight)


class _DispatcherCollector(Collector):
    """Numbers with labels that come and go: per worker, and per kind of prefill."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def collect(self) -> Iterable[Metric]:
        placer = self._dispatcher.placer
        overflows = CounterMetricFamily("sangam_router_overflows", "Prefills that overflowed the prefill pool")
        overflows.add_metric([], placer.num_overflows)
        prefills = CounterMetricFamily("sangam_router_prefills", "Prefills placed", labels=["cause", "route"])
        for labels, count in list(self._dispatcher.num_prefills.items()):
            prefills.add_metric(labels, count)
        per_worker = {
            name: GaugeMetricFamily(f"sangam_router_{name}", about, labels=["component", "worker"])
            for name, about in (
                ("outstanding_prefill_tokens", "o_w: assigned, not yet run"),
                ("used_pages", "Pages of the blocks placed there"),
                ("promised_pages", "Pages promised to pending decodes"),
            )
        }
        for worker in self._dispatcher.fleet:
            labels = (worker.report.component, str(worker.worker_id))
            for name, family in per_worker.items():
                family.add_metric(labels, getattr(worker.load, name))
        return (overflows, prefills, *per_worker.values())
