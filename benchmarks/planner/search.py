"""Search for the highest load that candidates bear, by doubling and bisection: pure, over whatever answers.

An answer is a ratio, below 1 if a candidate bears a load. It is taken to be monotone: who fails at a load is not
asked at a higher one. Where it is noisy, one of the loads is found around which it changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C")
Question = tuple[C, float]
"""A candidate and a load."""
Race = Generator[list[Question[C]], Sequence[float], "list[Standing[C]]"]
"""Yields questions, is sent their answers in order, returns standings, the best first."""

STEP = 1.03
"""Loads are on one grid, each by so much above the one below: what is asked twice can be answered once."""


@dataclass(frozen=True)
class Standing(Generic[C]):
    """How a candidate did.

    Attributes:
        load: the highest of those asked that it bears; 0: none.
        ratio: its answer there.
    """

    candidate: C
    load: float
    ratio: float


def load_at(place: int) -> float:
    """The grid's loads, requests per second, to 4 digits."""
    return float(f"{STEP**place:.4g}")


def place_below(load: float) -> int:
    """Of the highest load of the grid that is no higher, but for the rounding."""
    return math.floor(math.log(load) / math.log(STEP) + 0.02)


def race(candidates: Sequence[C], start: float, *, stride: int, resolution: int = 1, reach: float = 1e3) -> Race[C]:
    """All candidates at ever higher loads; who fails is out, unless all do.

    Args:
        start: the load to begin at.
        stride: places of the grid to the next load, doubled each time, upwards until nobody bears one or else
            downwards until anybody does. Then bisection.
        resolution: places between the highest load that anybody bears and the lowest that nobody does, in the end.
        reach: loads are between start / reach and start * reach.
    """
    best = {candidate: Standing(candidate, 0.0, math.inf) for candidate in candidates}
    alive = list(best)
    place = place_below(start)
    bottom, top = place_below(start / reach), place_below(start * reach)
    low: int | None = None
    high: int | None = None
    while low is None or high is None or high - low > resolution:
        load = load_at(place)
        ratios = yield [(candidate, load) for candidate in alive]
        met = {candidate: ratio for candidate, ratio in zip(alive, ratios, strict=True) if ratio < 1}
        best |= {candidate: Standing(candidate, load, ratio) for candidate, ratio in met.items()}
        if met:
            low, alive = place, list(met)
        else:
            high = place
        if low is not None and high is not None:
            place = (low + high) // 2
        elif place == (top if met else bottom):
            break
        else:
            place = min(place + stride, top) if met else max(place - stride, bottom)
            stride *= 2
    return sorted(best.values(), key=lambda standing: (-standing.load, standing.ratio))


def together(races: Sequence[Race[C]], ask: Callable[[list[Question[C]]], Sequence[float]]) -> list[list[Standing[C]]]:
    """Runs races in step, so that many questions are asked at once; their results in order."""
    results: list[list[Standing[C]]] = [[] for _ in races]
    answers: dict[int, Sequence[float] | None] = dict.fromkeys(range(len(races)))
    while answers:
        questions: dict[int, list[Question[C]]] = {}
        for number, answer in answers.items():
            try:
                questions[number] = next(races[number]) if answer is None else races[number].send(answer)
            except StopIteration as end:
                results[number] = end.value
        asked = iter(ask([question for batch in questions.values() for question in batch]) if questions else ())
        answers = {number: [next(asked) for _ in batch] for number, batch in questions.items()}
    return results
