"""What is followed of a request over its blocks, and of a block on its way through the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend.core.ledger import Dispatch
from backend.core.request import Request
from backend.core.routing import RouteKind
from backend.core.sampling_params import SamplingParams
from backend.core.step import PHASES
from benchmarks.simulator.denoising import Commits

if TYPE_CHECKING:
    from benchmarks.simulator.worker import SimWorker

PREFILL_QUEUE, PREFILL, DECODE_QUEUE, TRANSFER, DECODE = range(len(PHASES))


@dataclass(eq=False, slots=True)
class Trip:
    """One request, as the router knows it.

    Attributes:
        blocks: what each forward of each block commits.
        due_s: when it arrived.
        tokens: of the blocks that are done.
        seconds: per phase, summed over blocks.
        route: how its first block was routed.
        committed_s: when its client had the last tokens.
    """

    index: int
    name: str
    prompt: Sequence[int]
    params: SamplingParams
    blocks: Sequence[Sequence[Commits]]
    due_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    route: RouteKind | None = None
    first_token_s: float | None = None
    committed_s: float = 0.0
    finished_s: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0


@dataclass(eq=False, slots=True)
class Flight:
    """One dispatch of one block.

    Attributes:
        request: as the worker knows it that has the block now.
        steps: what each of its forwards commits.
        waiting_since: when the router began to look for a worker.
        added_s, started_s, ready_s: on the present worker: when it came, when its prefill or transfer
            began, when its KV was there.
        frontier: what of the block is with the client.
    """

    trip: Trip
    dispatch: Dispatch
    request: Request
    num_tokens: int
    steps: Sequence[Commits]
    waiting_since: float
    source: SimWorker | None = None
    worker: SimWorker | None = None
    added_s: float = 0.0
    started_s: float = 0.0
    ready_s: float = 0.0
    frontier: int = 0
