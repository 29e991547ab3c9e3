"""Where a block goes: pure decisions on (request size, loads of the workers)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

WorkerId = int


@dataclass(frozen=True)
class WorkerLoad:
    """What the router knows of one worker when it decides.

    Attributes:
        outstanding_prefill_tokens: o_w, assigned and not yet run.
        num_requests: blocks placed there and not yet done.
    """

    worker_id: WorkerId
    outstanding_prefill_tokens: int
    num_requests: int


@dataclass(frozen=True)
class Route:
    worker_id: WorkerId


class ColocatedPolicy:
    """Least outstanding prefill tokens; every arrival and every refresh alike (paper section 4.3).

    Among equals the worker with the fewest requests, then the lowest id: decodes spread too.
    """

    def route(self, loads: Iterable[WorkerLoad]) -> Route | None:
        """The worker for the next prefill, or None if there is none."""
        best = min(loads, key=lambda w: (w.outstanding_prefill_tokens, w.num_requests, w.worker_id), default=None)
        return Route(best.worker_id) if best else None
