"""From what a client saw of each request to the figures of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Outcome:
    """One request as its client saw it; times are seconds from the start of the run.

    Attributes:
        intended_s: when it was due. Latencies count from here: a client that is late, because the server
            keeps it waiting or the machine is busy, adds its lateness to the latency.
        sent_s: when it was really sent.
        first_token_s: when the first committed tokens arrived; None if none did.
        commit_gaps_s: between one arrival of committed tokens and the next.
        num_tokens: completion tokens the server says it returned (`usage`), no masks and no end of text.
        error: what went wrong, in a word or two; empty if the whole answer came.
        is_correct: whether the answer was the right one; None where nothing is right or wrong, or it failed.
    """

    index: int
    task: str
    intended_s: float
    sent_s: float
    finished_s: float
    first_token_s: float | None = None
    commit_gaps_s: tuple[float, ...] = ()
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    finish_reason: str = ""
    text: str = ""
    error: str = ""
    is_correct: bool | None = None

    @property
    def latency_s(self) -> float:
        return self.finished_s - self.intended_s

    @property
    def first_token_latency_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.intended_s


@dataclass(frozen=True)
class Objective:
    """A service level objective: what a request must keep to count as good.

    Attributes:
        latency_s: bound on the end-to-end latency.
        first_token_s: bound on the time to the first committed tokens; None bounds nothing.
    """

    latency_s: float
    first_token_s: float | None = None

    def is_met(self, outcome: Outcome) -> bool:
        first = outcome.first_token_latency_s
        in_time = self.first_token_s is None or (first is not None and first <= self.first_token_s)
        return not outcome.error and outcome.latency_s <= self.latency_s and in_time


@dataclass(frozen=True)
class Distribution:
    """Seconds: what most looked at of many. All nan if there were none."""

    mean: float = float("nan")
    p50: float = float("nan")
    p90: float = float("nan")
    p99: float = float("nan")
    max: float = float("nan")

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        """Percentiles are interpolated linearly between the values next to them."""
        array = np.fromiter(values, float)
        if not array.size:
            return cls()
        p50, p90, p99 = (float(p) for p in np.percentile(array, (50, 90, 99)))
        return cls(float(array.mean()), p50, p90, p99, float(array.max()))


@dataclass(frozen=True)
class Summary:
    """The figures of one run.

    Attributes:
        achieved_rate: requests that were due, per second of the run: what the arrival process really did.
        completed_rate: whole answers per second, from the first request due to the last answer.
        tokens_per_s: tokens of whole answers over the same time.
        goodput: answers per second of the run that met the objective.
        latency: end-to-end, of whole answers. Requests that failed are in `errors`, not in here.
        lateness: by how much requests were sent after they were due: the load generator's own trouble.
        correct: right answers and answers that could be checked, per task.
    """

    num_requests: int
    num_completed: int
    errors: Mapping[str, int]
    duration_s: float
    achieved_rate: float
    completed_rate: float
    tokens_per_s: float
    mean_prompt_tokens: float
    mean_tokens: float
    goodput: float
    latency: Distribution
    first_token: Distribution
    commit_gap: Distribution
    lateness: Distribution
    correct: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def summarize(outcomes: Sequence[Outcome], duration_s: float, objective: Objective) -> Summary:
    """Args:
    duration_s: for how long requests were due; answers may come later.
    """
    completed = [outcome for outcome in outcomes if not outcome.error]
    first_due = min((outcome.intended_s for outcome in outcomes), default=0.0)
    span_s = max((outcome.finished_s for outcome in completed), default=first_due) - first_due
    first_tokens = (outcome.first_token_latency_s for outcome in completed)
    return Summary(
        num_requests=len(outcomes),
        num_completed=len(completed),
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common()),
        duration_s=duration_s,
        achieved_rate=_per_second(len(outcomes), duration_s),
        completed_rate=_per_second(len(completed), span_s),
        tokens_per_s=_per_second(sum(outcome.num_tokens for outcome in completed), span_s),
        mean_prompt_tokens=_mean([outcome.num_prompt_tokens for outcome in completed]),
        mean_tokens=_mean([outcome.num_tokens for outcome in completed]),
        goodput=_per_second(sum(objective.is_met(outcome) for outcome in outcomes), duration_s),
        latency=Distribution.of(outcome.latency_s for outcome in completed),
        first_token=Distribution.of(seconds for seconds in first_tokens if seconds is not None),
        commit_gap=Distribution.of(gap for outcome in completed for gap in outcome.commit_gaps_s),
        lateness=Distribution.of(outcome.sent_s - outcome.intended_s for outcome in outcomes),
        correct=_correct(completed),
    )


def _per_second(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _correct(completed: Iterable[Outcome]) -> dict[str, tuple[int, int]]:
    checked: dict[str, list[bool]] = {}
    for outcome in completed:
        if outcome.is_correct is not None:
            checked.setdefault(outcome.task, []).append(outcome.is_correct)
    return {task: (sum(results), len(results)) for task, results in sorted(checked.items())}
