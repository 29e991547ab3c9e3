"""A graph as data: which processes serve a model together, and how many of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Component:
    """One kind of process.

    Attributes:
        name: also its section in the graph's YAML file and, in Dynamo, its component.
        module: what `python -m` runs; a string, so that reading a graph imports no engine.
        replicas: the key of its section that says how many such processes there are; one if empty.
    """

    name: str
    module: str
    replicas: str = ""


@dataclass(frozen=True)
class Graph:
    """Components in the order a request meets them: started from the last, stopped from the first."""

    name: str
    components: tuple[Component, ...]
