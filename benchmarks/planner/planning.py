"""From an objective to a plan: screens all candidates with short runs, then measures the finalists with long ones.

What is screened, in this order: colocated with a middling tau, for a load to begin at; each graph's splits and the
colocated graph's tau; theta, then tau, of the two best hybrid splits. Finalists are asked on other seeds than those
that chose them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.planner.search import Question, Race, Standing, load_at, place_below, race, together
from benchmarks.planner.slo import Slo
from benchmarks.planner.space import GRAPHS, budgets, graph_of, num_gpus, splits, thresholds
from benchmarks.planner.trial import Ask, Point, Trial
from benchmarks.simulator.config import SimulatorConfig

IDLE_LOAD = 1e-3
"""Requests per second at which none meets another."""
CURVE = (0.5, 0.8, 1.0, 1.1)
"""Loads of the curves, over the best capacity."""


@dataclass(frozen=True)
class Effort:
    """How long a run is.

    Attributes:
        num_requests: at least.
        num_bounds: for how many times the objective's loosest bound requests arrive, at least: a load that is
            too high by a tenth has a backlog of a tenth of that in the end, which has to show.
    """

    num_requests: int
    num_bounds: float

    def at(self, load: float, slo: Slo) -> int:
        """Requests of a run."""
        return max(self.num_requests, math.ceil(load * slo.loosest_s * self.num_bounds))


SCREENING = Effort(320, 2.0)
NUM_BOUNDS = 4.0
"""Of the finalists' runs."""


@dataclass(frozen=True)
class Capacity:
    """What one configuration bears.

    Attributes:
        loads: the highest load that meets the objective, requests per second, of each seed.
        peak_tokens: in flight at most, at loads that meet the objective.
    """

    config: SimulatorConfig
    loads: tuple[float, ...]
    peak_tokens: int

    @property
    def load(self) -> float:
        return median(self.loads)

    @property
    def per_gpu(self) -> float:
        return self.load / num_gpus(self.config)


@dataclass(frozen=True)
class Plan:
    """Attributes:
    capacities: of the finalists, the best first.
    curves: load -> point, of the best of each graph, on the first of the finals' seeds.
    num_screened: candidates that were tried.
    """

    capacities: tuple[Capacity, ...]
    curves: dict[SimulatorConfig, dict[float, Point]]
    num_screened: int

    @property
    def best(self) -> Capacity:
        return self.capacities[0]


class Infeasible(Exception):
    """Nothing meets the objective at any load.

    Attributes:
        config, point: the nearest to it, in an empty system.
    """

    def __init__(self, config: SimulatorConfig, point: Point) -> None:
        super().__init__(config.name)
        self.config, self.point = config, point


class Planner:
    """Args:
    base: model, GPU and everything else that is not searched.
    seed: of screening; the finals have the `num_seeds` that follow.
    """

    def __init__(
        self,
        base: SimulatorConfig,
        slo: Slo,
        ask: Ask,
        *,
        seed: int = 1,
        num_seeds: int = 3,
        screening: Effort = SCREENING,
        finals: Effort,
    ) -> None:
        self._base, self._slo, self._ask = base, slo, ask
        self._seed, self._seeds = seed, range(seed + 1, seed + 1 + num_seeds)
        self._screening, self._finals = screening, finals
        self._screened: set[SimulatorConfig] = set()

    def plan(self, num_gpus: int) -> Plan:
        """Raises Infeasible; or see `simulate`."""
        graphs = GRAPHS if num_gpus > 1 else ("colocated",)
        by_graph = {graph: splits(self._base, num_gpus, graph) for graph in graphs}
        colocated = by_graph["colocated"]
        idle = self._idle(colocated[0])
        start = 1.5 * num_gpus / idle.mean_s
        ((first, *_),) = self._screen([race(colocated, start, stride=4, resolution=2)])
        by_graph["colocated"] = budgets(colocated)
        start = first.load or start / 8
        found = self._screen([self._near(configs, start) for configs in by_graph.values()])
        standings = {graph: _borne(best) for graph, best in zip(graphs, found, strict=True)}
        finalists = standings["colocated"][:2]
        if num_gpus > 1:
            finalists += standings["disaggregated"][:1] + self._hybrids(standings["hybrid"])[:1]
        capacities = self._capacities(finalists)
        if not capacities or not capacities[0].load:
            raise Infeasible(colocated[0], idle)  # so near to the bound that other requests miss it
        return Plan(capacities, self._curves(capacities), len(self._screened))

    def _hybrids(self, best: list[Standing[SimulatorConfig]]) -> list[Standing[SimulatorConfig]]:
        """The best splits with their best theta and tau."""
        for grid, num_kept in ((thresholds, 2), (budgets, 1)):
            if best:
                configs = grid([standing.candidate for standing in best[:num_kept]])
                (standings,) = self._screen([self._near(configs, best[0].load)])
                best = _borne(standings)
        return best

    def _near(self, configs: Sequence[SimulatorConfig], load: float) -> Race[SimulatorConfig]:
        """A graph that bears less than an eighth of another's load is of no interest."""
        return race(configs, load, stride=2, resolution=2, reach=8.0)

    def _idle(self, colocated: SimulatorConfig) -> Point:
        """Requests that are alone. Raises Infeasible: no graph is faster than one without transfers."""
        num_requests = self._screening.num_requests
        (point,) = self._ask([Trial(colocated, IDLE_LOAD, self._seed, num_requests, may_stop=False)])
        if point.ratio >= 1:
            raise Infeasible(colocated, point)
        return point

    def _screen(self, races: Sequence[Race[SimulatorConfig]]) -> list[list[Standing[SimulatorConfig]]]:
        def ask(questions: list[Question[SimulatorConfig]]) -> list[float]:
            self._screened |= {config for config, _ in questions}
            trials = [
                Trial(config, load, self._seed, self._screening.at(load, self._slo)) for config, load in questions
            ]
            return [point.ratio for point in self._ask(trials)]

        return together(races, ask)

    def _capacities(self, finalists: Iterable[Standing[SimulatorConfig]]) -> tuple[Capacity, ...]:
        """Of each on every seed, from where screening saw it."""
        entries = {standing.candidate: standing.load for standing in finalists}
        peaks: dict[SimulatorConfig, int] = dict.fromkeys(entries, 0)

        def ask(questions: list[Question[tuple[SimulatorConfig, int]]]) -> list[float]:
            trials = [Trial(config, load, seed, self._finals.at(load, self._slo)) for (config, seed), load in questions]
            points = self._ask(trials)
            for trial, point in zip(trials, points, strict=True):
                if point.ratio < 1:
                    peaks[trial.config] = max(peaks[trial.config], point.peak_tokens)
            return [point.ratio for point in points]

        # Long runs bear less than short ones, and one seed less than another, to all configurations alike: from what
        # the first bears on a seed, the others' answers are a step or two away.
        pilot, *others = entries
        standings = together(
            [race([(pilot, seed)], 0.85 * entries[pilot], stride=2) for seed in self._seeds],
            ask,
        )
        borne = {
            seed: standing.load or 0.85 * entries[pilot]
            for seed, (standing,) in zip(self._seeds, standings, strict=True)
        }
        standings += together(
            [race([(config, seed)], borne[seed], stride=1) for config in others for seed in self._seeds],
            ask,
        )
        loads = {standing.candidate: standing.load for (standing,) in standings}
        capacities = [
            Capacity(config, tuple(loads[config, seed] for seed in self._seeds), peaks[config]) for config in entries
        ]
        return tuple(sorted(capacities, key=lambda capacity: (-capacity.load, -sum(capacity.loads))))

    def _curves(self, capacities: Sequence[Capacity]) -> dict[SimulatorConfig, dict[float, Point]]:
        best = {graph_of(capacity.config): capacity.config for capacity in reversed(capacities)}
        loads = [load_at(place_below(part * capacities[0].load)) for part in CURVE]
        configs = sorted(best.values(), key=[capacity.config for capacity in capacities].index)
        trials = [
            Trial(config, load, self._seeds[0], self._finals.at(load, self._slo), may_stop=False)
            for config in configs
            for load in loads
        ]
        points = iter(self._ask(trials))
        return {config: {load: next(points) for load in loads} for config in configs}


def _borne(standings: Iterable[Standing[SimulatorConfig]]) -> list[Standing[SimulatorConfig]]:
    return [standing for standing in standings if standing.load]
