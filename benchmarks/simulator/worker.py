"""One worker: the real scheduler and page pool, driven as the live step loop drives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from backend.core.page_pool import PagePool
from backend.core.prefill_scheduler import PrefillScheduler, PrefillSchedulerConfig
from backend.core.request import Request
from backend.core.scheduler import Scheduler, SchedulerConfig
from backend.core.step import StepPlan, StepResult
from backend.core.worker_pool import WorkerLoad
from benchmarks.simulator.clock import Clock
from benchmarks.simulator.config import SimulatorConfig
from benchmarks.simulator.timing import Timing

if TYPE_CHECKING:
    from benchmarks.simulator.flight import Flight


class Listener(Protocol):
    """Who sends on what a worker has to say."""

    def stepped(self, plan: StepPlan, left: Sequence[Request]) -> None:
        """A step has run, and these requests left by it."""
        ...

    def freed(self, flight: Flight) -> None:
        """A prefill worker has freed what was read."""
        ...


class SimWorker:
    """Does one step after the other, and what it was asked meanwhile between two steps (`AsyncEngine`).

    Args:
        flights: the blocks on their way, by the worker's name of their request.
        horizon_s: until when `busy_s` counts.

    Attributes:
        busy_s: spent in steps.
        num_decodes: summed over steps.
        num_refreshes: prefills in the middle of blocks, which the others do not count.
    """

    def __init__(
        self,
        worker_id: int,
        is_prefill: bool,
        config: SimulatorConfig,
        clock: Clock,
        timing: Timing,
        flights: dict[str, Flight],
        listener: Listener,
        horizon_s: float,
    ) -> None:
        self.worker_id = worker_id
        self.is_prefill = is_prefill
        self.load = WorkerLoad(worker_id, config.num_pages, config.page_size)
        pool = PagePool(config.num_pages, config.page_size)
        self.scheduler: Scheduler | PrefillScheduler
        if is_prefill:
            self.scheduler = PrefillScheduler(PrefillSchedulerConfig(config.max_prefill_tokens), pool)
        else:
            self.scheduler = Scheduler(SchedulerConfig(config.token_budget, config.max_num_seqs), pool)
        self._clock, self._timing, self._flights = clock, timing, flights
        self._listener, self._horizon_s = listener, horizon_s
        self._asked: list[tuple[Callable[[Flight], None], Flight]] = []
        self._is_awake = False
        self.busy_s = 0.0
        self.num_steps = self.num_decodes = 0
        self.num_prefills = self.num_prefill_tokens = self.num_refreshes = 0

    def add(self, flight: Flight) -> None:
        """A block comes to be prefilled, or to be denoised once its KV has been read."""
        flight.added_s = self._clock.now
        self._ask(self._add, flight)

    def read(self, flight: Flight) -> None:
        """Somebody has read a block's KV here."""
        self._ask(self._release, flight)

    def _ask(self, what: Callable[[Flight], None], flight: Flight) -> None:
        self._asked.append((what, flight))
        if not self._is_awake:
            # Not at once: what is asked at the same instant is seen by the same step.
            self._is_awake = True
            self._clock.after(self._timing.turn_s(self), self._go_on)

    # What follows is what the step loop's thread does.

    def _go_on(self) -> None:
        asked, self._asked = self._asked, []
        for what, flight in asked:
            what(flight)
        scheduler = self.scheduler
        if isinstance(scheduler, Scheduler):
            for request in scheduler.start_transfers():
                self._start_transfer(self._flights[request.request_id])
        plan = scheduler.schedule(self._clock.now)
        if plan is None:
            self._is_awake = False
            return
        seconds = self._timing.step_s(self, plan)
        now = self._clock.now
        self.busy_s += max(min(seconds, self._horizon_s - now), 0.0)
        self._clock.after(seconds, self._step_ended, plan, now)

    def _step_ended(self, plan: StepPlan, started_s: float) -> None:
        flights = self._flights
        for request in plan.prefills:
            if request.block.step:  # in the middle of its block
                self.num_refreshes += 1
                continue
            flight = flights[request.request_id]
            flight.started_s, flight.ready_s = started_s, self._clock.now
            self.num_prefills += 1
            self.num_prefill_tokens += request.sequence_length
        self.num_steps += 1
        self.num_decodes += len(plan.decodes)
        commits = [flights[r.request_id].steps[r.block.step] for r in (*plan.prefills, *plan.decodes)]
        left = self.scheduler.update(plan, StepResult(commits))
        self._listener.stepped(plan, left)
        # Not at once either: what comes at this very moment is seen by the next step.
        self._clock.after(self._timing.turn_s(self), self._go_on)

    def _add(self, flight: Flight) -> None:
        self.scheduler.add(flight.request)

    def _release(self, flight: Flight) -> None:
        assert isinstance(self.scheduler, PrefillScheduler)
        self.scheduler.release(flight.request.request_id)
        self._listener.freed(flight)

    def _start_transfer(self, flight: Flight) -> None:
        assert flight.source is not None
        flight.started_s = self._clock.now
        self._clock.after(self._timing.transfer_s(flight), self._ask, self._transfer_ended, flight)
        self._clock.after(self._timing.read_s(flight), flight.source.read, flight)

    def _transfer_ended(self, flight: Flight) -> None:
        assert isinstance(self.scheduler, Scheduler)
        self.scheduler.transfer_ended(flight.request.request_id, True)
        flight.ready_s = self._clock.now
