"""Which workers there are and which of them may get work: what the placer chooses from."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from backend.core.placer import Placer
from backend.core.worker_pool import WorkerId, WorkerLoad, WorkerPool
from components.load_bus import LoadBus
from components.protocol import LoadReport, ModelCard
from components.runtime import Workers

log = logging.getLogger(__name__)

# A worker to which a call broke is alive if it is heard within so long: several load reports.
_SUSPECT_TIMEOUT_S = 1.5
_LONGEST_SUSPICION_S = 30.0


@dataclass
class FleetWorker:
    """What is known of one worker from its load reports, and the router's account of it."""

    report: LoadReport
    load: WorkerLoad
    heard_at: float
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has been silent for too long; whoever waits for it stops waiting."""
    is_suspect: bool = False
    """A call to it broke; it gets no new work until it is heard again, and later from time to time."""
    num_breaks: int = 0
    """Times in a row that it became suspect without having done anything in between."""
    suspect_until: float = 0.0

    @property
    def worker_id(self) -> WorkerId:
        return self.report.worker_id

    @property
    def kind(self) -> tuple[ModelCard, int]:
        """Workers can stand in for each other, and read each other's KV, if this is the same."""
        return self.report.model, self.report.page_size


class Fleet:
    """Follows the workers by load reports and discovery, and shows the usable ones to the placer.

    Args:
        calls: the worker endpoints, by component: "prefill_worker", "colocated_worker".
        worker_timeout_s: silence after which a worker counts as lost.
    """

    def __init__(self, placer: Placer, calls: Mapping[str, Workers], bus: LoadBus, worker_timeout_s: float) -> None:
        self._placer = placer
        self._pools = {"prefill_worker": placer.prefill_pool, "colocated_worker": placer.colocated_pool}
        self._calls = calls
        self._bus = bus
        self._worker_timeout_s = worker_timeout_s
        self._workers: dict[WorkerId, FleetWorker] = {}
        self.accepts_requests = False
        """Whether a colocated worker is there that does not drain. Without one, those that drain finish
        what has begun."""

    def receive(self, report: LoadReport) -> None:
        """Takes in a load report."""
        if report.component not in self._pools:
            return
        worker = self._workers.get(report.worker_id)
        if worker is None or worker.lost.is_set():
            if worker is not None:
                self._placer.hide(worker.load)
            # Its account starts anew: what it had before it was lost is placed elsewhere by now.
            load = WorkerLoad(report.worker_id, report.num_pages, report.page_size)
            worker = self._workers[report.worker_id] = FleetWorker(report, load, 0.0)
            if worker.kind == self._kind:
                log.info("%s %d is here", report.component, report.worker_id)
            else:
                log.error(
                    "%s %d gets no work: its checkpoint, dtype or page size is not that of the workers before it",
                    report.component, report.worker_id,
                )  # fmt: skip
        elif report.is_draining and not worker.report.is_draining:
            log.info("%s %d drains", report.component, report.worker_id)
        began_to_drain = report.is_draining and not worker.report.is_draining
        worker.report, worker.heard_at = report, time.monotonic()
        worker.is_suspect = worker.is_suspect and worker.heard_at < worker.suspect_until
        # Reports are many, so that who is in use is looked up in discovery by `watch` alone.
        is_listed = worker.load.pool is not None or report.worker_id in self._calls[report.component].ids()
        if began_to_drain:
            self._look_for_last_resorts(worker)
        self._show_or_hide(worker, is_listed)

    def watch(self) -> None:
        """Declares silent workers lost and follows discovery; to be called a few times a second.

        While the router itself is cut off from NATS nobody is heard, and nobody is lost.
        """
        now = time.monotonic()
        listed = {component: set(calls.ids()) for component, calls in self._calls.items()}
        self._look_for_last_resorts()
        for worker in list(self._workers.values()):
            component = worker.report.component
            silence = now - max(worker.heard_at, self._bus.connected_since)
            patience = min(_SUSPECT_TIMEOUT_S, self._worker_timeout_s) if worker.is_suspect else self._worker_timeout_s
            if silence > patience and not worker.lost.is_set():
                if worker.worker_id in listed[component]:  # else it has left
                    log.warning("%s %d has been silent for %.1f s: lost", component, worker.worker_id, silence)
                worker.lost.set()
            self._show_or_hide(worker, worker.worker_id in listed[component])
            if worker.lost.is_set() and worker.worker_id not in listed[component]:
                del self._workers[worker.worker_id]

    def suspect(self, worker: FleetWorker) -> None:
        """A call to it broke: it is left out until it is heard again.

        For longer each time, if nothing but breaks comes of it: being free, it would attract all work.
        """
        if not worker.is_suspect:
            worker.is_suspect = True
            worker.suspect_until = time.monotonic() + min(0.2 * (2.0**worker.num_breaks - 1), _LONGEST_SUSPICION_S)
            worker.num_breaks = min(worker.num_breaks + 1, 10)
            self._placer.hide(worker.load)

    def of(self, load: WorkerLoad) -> FleetWorker | None:
        """The worker that a route names; None if it has gone meanwhile."""
        worker = self._workers.get(load.worker_id)
        return worker if worker is not None and worker.load is load else None

    def calls(self, worker: FleetWorker) -> Workers:
        return self._calls[worker.report.component]

    def __iter__(self) -> Iterator[FleetWorker]:
        """Those of this moment: Dynamo asks for metrics in a thread of its own, while workers come and go."""
        return iter(list(self._workers.values()))

    @property
    def model(self) -> ModelCard | None:
        """The model of the worker heard of first; a worker of another kind gets no work."""
        return self._kind[0] if self._kind else None

    @property
    def _kind(self) -> tuple[ModelCard, int] | None:
        return next((worker.kind for worker in self._workers.values() if not worker.lost.is_set()), None)

    def _is_last_resort(self, worker: FleetWorker) -> bool:
        return not self.accepts_requests and worker.report.component == "colocated_worker"

    def _look_for_last_resorts(self, draining: FleetWorker | None = None) -> None:
        self.accepts_requests = any(
            (worker.load.pool is not None or worker.is_suspect)
            and not worker.report.is_draining
            and worker is not draining
            and not worker.lost.is_set()
            for worker in self._workers.values()
            if worker.report.component == "colocated_worker"
        )

    def _show_or_hide(self, worker: FleetWorker, is_listed: bool) -> None:
        is_usable = (
            is_listed
            and worker.kind == self._kind
            and (not worker.report.is_draining or self._is_last_resort(worker))
            and not worker.is_suspect
            and not worker.lost.is_set()
        )
        pool: WorkerPool = self._pools[worker.report.component]
        if is_usable and worker.load.pool is None:
            self._placer.show(worker.load, pool)
        elif not is_usable and worker.load.pool is not None:
            self._placer.hide(worker.load)
