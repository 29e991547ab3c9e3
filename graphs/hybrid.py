"""Hybrid serving: prefill workers hand KV to colocated workers, which also prefill what overflows (paper, 4.2)."""

from __future__ import annotations

from graphs.graph import Component, Graph

HYBRID = Graph(
    "hybrid",
    (
        (Component("frontend", "dynamo.frontend"),),
        (Component("router", "components.router"),),
        (
            Component("prefill_worker", "components.prefill_worker", "num_workers", ("--prefill",)),
            Component("colocated_worker", "components.colocated_worker", "num_workers", ("--colocated",)),
        ),
    ),
)
