"""What one step runs and what comes out of it: plain data between scheduler and engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backend.core.logprobs import TokenLogprobs
from backend.core.request import Request

PHASES = ("prefill_queue", "prefill", "decode_queue", "transfer", "decode")
"""What a block's time is spent on, in order; transfer and what leads to it only if it is prefilled elsewhere."""

PhaseSeconds = tuple[float, float, float, float, float]
NO_TIME: PhaseSeconds = (0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)  # frozen, it would take three times as long to make, and each step makes one
class StepPlan:
    """One packed forward: whole sequences of `prefills`, and of `decodes` what their cache policies recompute.

    The requests hold the pages they read and write (`request.pages`). Which positions a decode computes
    is `backend.core.queries.query`'s to say.

    Attributes:
        decode_tokens: that these are in all.
    """

    prefills: Sequence[Request]
    decodes: Sequence[Request]
    decode_tokens: int = 0


@dataclass(slots=True)
class StepResult:
    """What a forward committed.

    Attributes:
        commits: per request of the plan (prefills, then decodes) its (offset in block, token) pairs.
        errors: request id -> why this request failed; the others of the step are not concerned.
        logprobs: request id -> of each of its commits; only of requests that ask for them.
    """

    commits: Sequence[Sequence[tuple[int, int]]]
    errors: Mapping[str, str] = field(default_factory=dict)
    logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
