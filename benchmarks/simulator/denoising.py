"""How many forwards a block takes and what each commits, without a model.

A block's draws depend on the seed, the request's number and the block's alone: every configuration under
comparison denoises the same blocks in the same number of steps.
"""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

Commits = tuple[tuple[int, int], ...]
"""(offset in block, token) pairs of one step."""

TOKEN, END_OF_TEXT = 1, 0


class StepsPerBlock(Protocol):
    """A model of denoising."""

    def draw(self, seed: int, index: int, num_blocks: int, block_length: int) -> Sequence[int]:
        """Forwards of each block of request number `index`, its prefill included: from 1 to `block_length`."""
        ...


@dataclass(frozen=True)
class Lognormal:
    """Forwards spread lognormally, over requests and again over the blocks of each.

    Attributes:
        mean: over all blocks, after rounding and clipping to what a block can take. Without any spread
            every block takes the nearest whole number.
        request_cv, block_cv: standard deviation over mean, before clipping.
    """

    mean: float
    request_cv: float = 0.6
    block_cv: float = 0.45

    def draw(self, seed: int, index: int, num_blocks: int, block_length: int) -> Sequence[int]:
        """Raises ValueError if no such mean is possible."""
        rng = random.Random(f"steps {seed} {index}")
        level = _level(self.mean, self.request_cv, self.block_cv, block_length)
        of_request = level + _sigma(self.request_cv) * rng.gauss(0.0, 1.0)
        sigma = _sigma(self.block_cv)
        logs = (of_request + sigma * rng.gauss(0.0, 1.0) for _ in range(num_blocks))
        return [min(max(round(math.exp(log)), 1), block_length) for log in logs]


def _sigma(cv: float) -> float:
    return math.sqrt(math.log1p(cv * cv))


@cache
def _level(mean: float, request_cv: float, block_cv: float, block_length: int) -> float:
    """The median's logarithm that gives this mean after rounding and clipping, by bisection."""
    sigma = math.hypot(_sigma(request_cv), _sigma(block_cv))
    if not 1 < mean < block_length:
        raise ValueError(f"a mean of {mean:g} forwards per block is not between 1 and {block_length}")
    if not sigma:
        return math.log(mean)
    low, high = math.log(0.01), math.log(100.0 * block_length)
    for _ in range(60):
        middle = (low + high) / 2
        if _clipped_mean(middle, sigma, block_length) < mean:
            low = middle
        else:
            high = middle
    return low


def _clipped_mean(level: float, sigma: float, block_length: int) -> float:
    """Sum of P(forwards >= n): the mean of a lognormal that is rounded and clipped to 1..block_length."""
    tails = (math.erfc((math.log(n - 0.5) - level) / (sigma * math.sqrt(2))) / 2 for n in range(2, block_length + 1))
    return 1.0 + sum(tails)


class Recorded:
    """Forwards of a recorded run, request by request in a seeded order.

    Args:
        path: a CSV file with the columns request and num_steps, one row per block in order.

    Raises:
        ValueError: other columns, or no rows.
    """

    def __init__(self, path: Path) -> None:
        of_request: dict[str, list[int]] = {}
        with path.open(newline="") as file:
            try:
                for row in csv.DictReader(file):
                    of_request.setdefault(row["request"], []).append(int(row["num_steps"]))
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{path}: expected the columns request and num_steps") from None
        if not of_request or min(min(steps) for steps in of_request.values()) < 1:
            raise ValueError(f"{path}: expected one or more rows of positive num_steps")
        self._requests = tuple(map(tuple, of_request.values()))

    def __repr__(self) -> str:
        return f"Recorded({self._requests!r})"

    def draw(self, seed: int, index: int, num_blocks: int, block_length: int) -> Sequence[int]:
        """A request that has more blocks than its recorded one goes through that one again."""
        recorded = random.Random(f"steps {seed} {index}").choice(self._requests)
        return [min(steps, block_length) for steps in itertools.islice(itertools.cycle(recorded), num_blocks)]


@cache
def commits_of(num_steps: int, block_length: int, end: int | None = None) -> tuple[Commits, ...]:
    """What each of a block's forwards commits: evenly many, from left to right.

    Real commits come out of order; what that changes is when the first tokens can be streamed, and how
    early a block ends that holds the end of the text.

    Args:
        end: the offset of the end-of-text token, if it is in this block.
    """
    bounds = [step * block_length // num_steps for step in range(num_steps + 1)]
    tokens = [END_OF_TEXT if offset == end else TOKEN for offset in range(block_length)]
    pairs = list(enumerate(tokens))
    return tuple(tuple(pairs[low:high]) for low, high in itertools.pairwise(bounds))
