"""A graph as data: which processes serve a model together, and how many of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Component:
    """One kind of process.

    Attributes:
        name: also its section in the graph's YAML file and, in Dynamo, its component.
        module: what `python -m` runs; a string, so that reading a graph imports no engine.
        replicas: of a worker, the key of its section that says how many there are; one process if empty.
        flags: what `sangam serve` calls that key, as it stands in several sections.
    """

    name: str
    module: str
    replicas: str = ""
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """Components in stages, in the order a request meets them.

    Started from the last stage, stopped from the first; the components of one stage do not wait for each other.

    Attributes:
        may_overflow: whether colocated workers may prefill what the prefill workers have no room for.
    """

    name: str
    stages: tuple[tuple[Component, ...], ...]
    may_overflow: bool = True

    @property
    def components(self) -> tuple[Component, ...]:
        return tuple(component for stage in self.stages for component in stage)
