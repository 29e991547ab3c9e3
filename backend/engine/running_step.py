"""A step on its way: what it commits in seats, and what was chosen on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backend.core.logprobs import TokenLogprobs
from backend.core.request import Request
from backend.core.step import StepResult
from backend.engine.host_choice import not_finite
from backend.engine.staging import Download
from backend.sampling.seats import FAILED, NOTHING


class RunningStep:
    """Made when its step is launched.

    Args:
        commits: int32 [at least as many as are seated, L], the token committed at each offset, -1 for none;
            None if the device unmasks nobody.
        seated: their places among the requests.
        chosen: what the host chose.
        hosted: for whom, by their places among the requests.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        commits: Download | None,
        seated: Sequence[int],
        chosen: StepResult,
        hosted: Sequence[int],
    ) -> None:
        self._requests = requests
        self._starts = [request.block_start for request in requests]
        self._commits, self._seated = commits, seated
        self._chosen, self._hosted = chosen, hosted

    def result(self) -> StepResult:
        """Waits for the step's end."""
        per_request: list[list[tuple[int, int]]] = [[] for _ in self._requests]
        errors = dict(self._chosen.errors)
        if self._commits is not None:
            commits = self._commits.array()[: len(self._seated)]
            rows, offsets = np.nonzero(commits != NOTHING)
            for row, offset, token in zip(
                rows.tolist(), offsets.tolist(), commits[rows, offsets].tolist(), strict=True
            ):
                per_request[self._seated[row]].append((offset, token))
            for row, offset in np.argwhere(commits == FAILED).tolist():
                at = self._seated[row]
                errors[self._requests[at].request_id] = not_finite(self._starts[at] + offset)
        for at, pairs in zip(self._hosted, self._chosen.commits, strict=True):
            per_request[at] = list(pairs)
        return StepResult(per_request, errors, self._chosen.logprobs)


class SplitStep:
    """A step that runs as several, one after the other."""

    def __init__(self, parts: Sequence[RunningStep]) -> None:
        self._parts = parts

    def result(self) -> StepResult:
        """Waits for the end of all."""
        commits: list[Sequence[tuple[int, int]]] = []
        errors: dict[str, str] = {}
        logprobs: dict[str, Sequence[TokenLogprobs]] = {}
        for part in self._parts:
            result = part.result()
            commits += result.commits
            errors |= result.errors
            logprobs |= result.logprobs
        return StepResult(commits, errors, logprobs)
