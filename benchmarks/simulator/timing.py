"""What takes how long between two decisions: the seam where a recorded run can stand in for the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from backend.core.queries import is_whole
from backend.core.step import StepPlan
from benchmarks.simulator.config import SimulatorConfig

if TYPE_CHECKING:
    from benchmarks.simulator.flight import Flight
    from benchmarks.simulator.worker import SimWorker

Message = Literal["prefill", "colocated", "decode", "prefilled", "done", "freed"]
"""To a worker, by kind of route; from one: a prefill has run, a block is done, pages that were read are free."""


class Timing(Protocol):
    """Every delay is in seconds from now."""

    def turn_s(self, worker: SimWorker) -> float:
        """From the end of a step, or when there was none from being asked for something, to the next step."""
        ...

    def step_s(self, worker: SimWorker, plan: StepPlan) -> float:
        """Until what the step has committed is known."""
        ...

    def message_s(self, message: Message, flight: Flight) -> float: ...

    def transfer_s(self, flight: Flight) -> float:
        """From the start of a KV transfer until the reader has all of it."""
        ...

    def read_s(self, flight: Flight) -> float:
        """From the start of a KV transfer until the prefill worker hears that it has ended."""
        ...


class Modelled:
    """By the latency model of a configuration."""

    def __init__(self, config: SimulatorConfig, block_length: int) -> None:
        self._config = config
        self._step_s = config.step_latency(block_length).step_s

    def turn_s(self, worker: SimWorker) -> float:
        return 0.0

    def step_s(self, worker: SimWorker, plan: StepPlan) -> float:
        prefills = [request.sequence_length for request in plan.prefills]
        context = sum([request.sequence_length for request in plan.decodes])
        seconds = self._step_s(prefills, len(plan.decodes), context, plan.decode_tokens)
        return seconds + self._config.hand_over_s * len(prefills) if worker.is_prefill else seconds

    def message_s(self, message: Message, flight: Flight) -> float:
        return self._config.hop_s

    def transfer_s(self, flight: Flight) -> float:
        """Of KV that the next step computes anew, one page is read: its source then hears that it may free all."""
        is_unused = is_whole(flight.request, logits_shift=0)
        return self._config.transfer_latency_s(self._config.page_size if is_unused else flight.num_tokens)

    def read_s(self, flight: Flight) -> float:
        return self.transfer_s(flight) + self._config.hop_s
