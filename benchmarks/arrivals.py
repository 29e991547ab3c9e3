"""When requests arrive: endless, seeded sequences of times in seconds from the start of a run.

Gaps are drawn whole, never clipped: a clipped "Poisson" process runs faster than its label says. What
a finite run really had is counted from its arrivals (`achieved_rate`), not taken from the label.
"""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Independent exponential gaps of mean 1 / rate.

    One seed draws the same gaps at every rate, stretched: loads of a sweep see one pattern.
    """
    rng = _generator(seed, rate)
    return itertools.accumulate(rng.expovariate(1.0) / rate for _ in itertools.count())


def gamma(rate: float, cv: float, seed: int) -> Iterator[float]:
    """Independent gamma gaps of mean 1 / rate whose standard deviation is `cv` times their mean.

    cv 1 is Poisson; above, arrivals come in clusters; below, they are regular.
    """
    if cv <= 0:
        raise ValueError(f"cv must be above 0, got {cv}")
    rng, shape = _generator(seed, rate), 1.0 / cv**2
    return itertools.accumulate(rng.gammavariate(shape, 1.0 / shape) / rate for _ in itertools.count())


def bursts(rate: float, size: int, seed: int) -> Iterator[float]:
    """`size` requests at the same instant; the instants are Poisson, the mean rate over all is `rate`."""
    if size < 1:
        raise ValueError(f"a burst has at least 1 request, got {size}")
    for instant in poisson(rate / size, seed):
        yield from itertools.repeat(instant, size)


def replay(path: Path, rate: float | None = None) -> list[float]:
    """The arrivals of a CSV file, counted from its first.

    It has a column arrival_s, in seconds; or, as the traces that the paper's prototype reads, Time in
    seconds (of one Date) or arrival_time in timestamps.

    Args:
        rate: stretches time so that this is the mean rate; the recorded one if None.

    Raises:
        ValueError: no such column, fewer than 2 arrivals, or times that go backwards.
    """
    csv.field_size_limit(1 << 30)  # see `lengths.read`
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        columns = set(table.fieldnames or ())
        try:
            if "arrival_time" in columns:
                times = [datetime.fromisoformat(row["arrival_time"]).timestamp() for row in table]
            else:
                times = [float(row["Time" if "Time" in columns else "arrival_s"]) for row in table]
        except (KeyError, ValueError, TypeError):
            raise ValueError(f"{path}: expected a column arrival_s of seconds") from None
    if len(times) < 2 or times != sorted(times) or times[0] == times[-1]:
        raise ValueError(f"{path}: arrival_s must hold 2 or more times, ascending")
    stretch = 1.0 if rate is None else (len(times) - 1) / (times[-1] - times[0]) / rate
    return [(time - times[0]) * stretch for time in times]


def within(times: Iterator[float] | Sequence[float], duration_s: float) -> list[float]:
    """The arrivals before `duration_s`. Their number is as random as the process makes it."""
    return list(itertools.takewhile(lambda time: time < duration_s, times))


def achieved_rate(times: Sequence[float], duration_s: float) -> float:
    """Arrivals per second over the run; 0 for an empty one."""
    return len(times) / duration_s if duration_s > 0 else 0.0


def _generator(seed: int, rate: float) -> random.Random:
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"a rate must be above 0 requests per second, got {rate}")
    return random.Random(f"arrivals {seed}")
