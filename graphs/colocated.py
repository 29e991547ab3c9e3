"""Colocated serving: identical workers, each of which prefills and denoises (paper, section 4.1)."""

from __future__ import annotations

from graphs.graph import Component, Graph

COLOCATED = Graph(
    "colocated",
    (
        (Component("frontend", "dynamo.frontend"),),
        (Component("router", "components.router"),),
        (Component("colocated_worker", "components.colocated_worker", "num_workers", ("--workers", "--colocated")),),
    ),
)
