"""What takes how long between two decisions: the seam where a recorded run can stand in for the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from backend.core.step import StepPlan
from benchmarks.simulator.config import SimulatorConfig

if TYPE_CHECKING:
    from benchmarks.simulator.flight import Flight
    from benchmarks.simulator.worker import SimWorker

Message = Literal["prefill", "colocated", "decode", "prefilled", "done", "read", "freed"]
"""Router to worker, by kind of route; a worker's news that a prefill has run, or that a block is done;
a reader's word to the prefill worker, and that one's to the router."""


class Timing(Protocol):
    """Every delay is in seconds from now."""

    def step_s(self, worker: SimWorker, plan: StepPlan) -> float:
        """Until the worker's next step may begin."""
        ...

    def wake_s(self, worker: SimWorker) -> float:
        """Until a worker that had nothing to do looks at what it was asked."""
        ...

    def message_s(self, message: Message, flight: Flight) -> float: ...

    def transfer_s(self, flight: Flight) -> float: ...


class Modelled:
    """By the latency model of a configuration."""

    def __init__(self, config: SimulatorConfig, block_length: int) -> None:
        self._config = config
        self._hop_s = config.hop_s
        self._step_s = config.step_latency(block_length).step_s

    def step_s(self, worker: SimWorker, plan: StepPlan) -> float:
        prefills = [request.sequence_length for request in plan.prefills]
        context = sum([request.sequence_length for request in plan.decodes])
        seconds = self._step_s(prefills, len(plan.decodes), context)
        return seconds + self._config.hand_over_s * len(prefills) if worker.is_prefill else seconds

    def wake_s(self, worker: SimWorker) -> float:
        return 0.0

    def message_s(self, message: Message, flight: Flight) -> float:
        return self._hop_s

    def transfer_s(self, flight: Flight) -> float:
        return self._config.transfer_latency_s(flight.num_tokens)
