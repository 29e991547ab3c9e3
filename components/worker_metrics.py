"""Prometheus metrics of one worker, read from the engine's snapshots."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from backend.core.step import PHASES
from backend.engine.async_engine import AsyncEngine
from backend.engine.block_stream import BlockUpdate

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_GAUGES = (
    ("num_waiting", "Blocks waiting for their prefill"),
    ("num_denoising", "Blocks being denoised"),
    ("num_transferring", "Blocks whose KV is being read, or waits for pages to be read into"),
    ("num_held", "Prefilled blocks whose KV waits to be read by a colocated worker"),
    ("waiting_tokens", "Prefill tokens waiting"),
    ("free_pages", "Free KV pages"),
    ("num_pages", "KV pages in all"),
    ("deficit", "Token budget carried forward, in tokens (Algorithm 1)"),
    ("max_older", "With token_budget auto: a prefill waits while so many older requests are denoised; else 0"),
)
_TOTALS = (
    ("num_steps", "num_steps", "Steps run"),
    ("num_prefill_tokens", "num_prefill_tokens", "Tokens prefilled"),
    ("num_refresh_tokens", "num_refresh_tokens", "Tokens of whole forwards in the middle of a block"),
    ("num_denoising_tokens", "num_denoising_tokens", "Tokens in denoising steps"),
    ("transfers", "num_transfers", "KV transfers read"),
    ("failed_transfers", "num_failed_transfers", "KV transfers that failed"),
    ("transfer_bytes", "num_transfer_bytes", "Bytes of KV read from prefill workers"),
    ("transfer_seconds", "transfer_seconds", "Seconds spent in KV transfers, summed over them"),
)


class WorkerMetrics:
    """The step loop itself does no metrics work: `refresh` brings the totals up to the engine's."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.registry = CollectorRegistry()
        for name, about in _GAUGES:
            gauge = Gauge(f"sangam_worker_{name}", about, registry=self.registry)
            gauge.set_function(lambda name=name: getattr(engine.load, name))  # type: ignore[misc]
        self._totals = [
            (attribute, Counter(f"sangam_worker_{name}", about, registry=self.registry))
            for name, attribute, about in _TOTALS
        ]
        self._seen: dict[str, float] = {}
        self._engine = engine
        self._blocks = Counter("sangam_worker_blocks", "Blocks by outcome", ["outcome"], registry=self.registry)
        self._phases = Histogram(
            "sangam_worker_phase_seconds", "Time of a block per phase", ["phase"],
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self._steps = Histogram(
            "sangam_worker_block_steps", "Forwards per block", buckets=(1, 2, 4, 8, 16, 32, 64), registry=self.registry
        )

    def refresh(self) -> None:
        load = self._engine.load
        for attribute, counter in self._totals:
            now = getattr(load, attribute)
            counter.inc(now - self._seen.get(attribute, 0))
            self._seen[attribute] = now

    def ended(self, outcome: str) -> None:
        """A block ended: done, failed, lost or refused."""
        self._blocks.labels(outcome).inc()

    def observe(self, update: BlockUpdate) -> None:
        """The phases and forwards of a block that this worker has done its part of."""
        self._steps.observe(update.num_steps)
        for phase, value in zip(PHASES, update.seconds, strict=True):
            if value:
                self._phases.labels(phase).observe(value)
