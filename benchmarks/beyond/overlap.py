"""KV that moves layer by layer while its prefill still runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulator.clock import Clock
from benchmarks.simulator.config import SimulatorConfig
from benchmarks.simulator.flight import Flight, Trip
from benchmarks.simulator.graph import Graph
from benchmarks.simulator.timing import Modelled


class Overlapped(Modelled):
    """What is left of a transfer after the prefill: the last layer, or what did not fit beside the others.

    As if the reader were always known when the prefill starts.
    """

    def __init__(self, config: SimulatorConfig, block_length: int) -> None:
        super().__init__(config, block_length)
        self._layers = config.shape.layers
        self._prefill_s = config.step_latency(block_length).step_s

    def transfer_s(self, flight: Flight) -> float:
        whole_s = super().transfer_s(flight)
        beside_s = self._prefill_s([flight.num_tokens], 0, 0) * (1 - 1 / self._layers)
        return max(whole_s / self._layers, whole_s - beside_s)


@dataclass(frozen=True)
class Overlap:
    block_length: int = 32

    def __call__(
        self,
        config: SimulatorConfig,
        clock: Clock,
        timing: object,
        horizon_s: float,
        on_finished: Callable[[Trip], None],
    ) -> Graph:
        return Graph(config, clock, Overlapped(config, self.block_length), horizon_s, on_finished)
