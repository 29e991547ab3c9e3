"""Service level objectives: bounds on figures of end-to-end latency, such as "p99<20s,mean<6s"."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from benchmarks.simulator.flight import Trip

_BOUND = re.compile(r"(?P<figure>mean|p(?P<percent>\d+(\.\d+)?))<(?P<number>\d+(\.\d+)?)(?P<unit>ms|s)")
_EXPECTED = 'expected bounds such as "p99<20s" or "mean<5s,p50<800ms"'


class Missed(Exception):
    """The objective can no longer be met, whatever comes."""


@dataclass(frozen=True)
class Bound:
    """One figure's bound.

    Attributes:
        percent: which percentile; None: the mean.
        seconds: the figure has to be below.
    """

    percent: float | None
    seconds: float

    def __str__(self) -> str:
        return f"{self.figure}<{self.seconds:g}s"

    @property
    def figure(self) -> str:
        return "mean" if self.percent is None else f"p{self.percent:g}"

    def of(self, latencies_s: npt.NDArray[np.float64]) -> float:
        """The figure, in seconds."""
        return float(latencies_s.mean() if self.percent is None else np.percentile(latencies_s, self.percent))


@dataclass(frozen=True)
class Slo:
    """All bounds have to be kept, over the requests of a run."""

    bounds: tuple[Bound, ...]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From bounds with commas between them: `mean` or a percentile, `<`, seconds (s) or milliseconds (ms).

        Raises:
            ValueError: anything else, a percentile that is not between 0 and 100, a bound of 0, a figure twice.
        """
        bounds = []
        for part in text.split(","):
            match = _BOUND.fullmatch("".join(part.split()))
            if match is None:
                raise ValueError(f"{part.strip()!r} is no bound: {_EXPECTED}")
            percent = float(match["percent"]) if match["percent"] else None
            seconds = float(match["number"]) / (1000 if match["unit"] == "ms" else 1)
            if percent is not None and not 0 < percent < 100:
                raise ValueError(f"{part.strip()!r}: a percentile is between 0 and 100")
            if not seconds:
                raise ValueError(f"{part.strip()!r}: nothing takes less than no time")
            bounds.append(Bound(percent, seconds))
        figures = [bound.figure for bound in bounds]
        if len(set(figures)) < len(figures):
            raise ValueError(f"{text!r} bounds a figure twice")
        return cls(tuple(bounds))

    def __str__(self) -> str:
        return ",".join(map(str, self.bounds))

    @property
    def loosest_s(self) -> float:
        return max(bound.seconds for bound in self.bounds)

    def ratio(self, latencies_s: npt.NDArray[np.float64]) -> float:
        """The worst figure over its bound: the objective is met below 1."""
        return max(bound.of(latencies_s) / bound.seconds for bound in self.bounds)

    def watch(self, arrivals_s: Sequence[float]) -> Callable[[Trip], None]:
        """To be told of every answer of a run of these arrivals; raises `Missed` once nothing can save it, not before.

        A run that misses by the interpolation of a percentile alone goes to its end.
        """
        missed = [_missed(bound, arrivals_s) for bound in self.bounds]

        def watch(trip: Trip) -> None:
            for is_missed in missed:
                if is_missed(trip):
                    raise Missed

        return watch


def _missed(bound: Bound, arrivals_s: Sequence[float]) -> Callable[[Trip], bool]:
    """Says, told each answer in turn, whether a bound is missed by now, by those that are under way included."""
    num_requests = len(arrivals_s)
    spent, num_due, num_met = 0.0, 0, 0
    met: list[float] = []  # a heap of when those were due that are not yet in num_met
    # Percentiles are interpolated upwards from the latency of this rank, counted from 0.
    rank = math.floor((num_requests - 1) * (bound.percent or 0.0) / 100)

    def is_mean_missed(trip: Trip) -> bool:
        nonlocal spent
        spent += trip.finished_s - trip.due_s
        return spent >= num_requests * bound.seconds

    def is_percentile_missed(trip: Trip) -> bool:
        nonlocal num_due, num_met
        latest = trip.finished_s - bound.seconds
        if trip.due_s > latest:
            heappush(met, trip.due_s)
        while num_due < num_requests and arrivals_s[num_due] <= latest:
            num_due += 1
        while met and met[0] <= latest:
            heappop(met)
            num_met += 1
        return num_due - num_met >= num_requests - rank  # late, whether they have ended or not

    return is_mean_missed if bound.percent is None else is_percentile_missed
