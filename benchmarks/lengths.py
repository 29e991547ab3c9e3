"""How long prompts and answers are, in tokens: traces from CSV files, and generators of the paper's two.

The generators reproduce Table 1 of the paper (median, p99 and standard deviation of prompt and output,
each within 1.5%): independent draws, truncated to a range; pairs of more than 4096 tokens are drawn anew,
as the paper filters its traces. Standard library only.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_TOTAL = 4096
COLUMNS = ("num_prompt_tokens", "num_output_tokens")
_ALIASES = (COLUMNS, ("prompt_len", "gen_len"), ("PromptTokenCount", "CompletionTokenCount"))
"""Ours, and those of the length traces and the full request traces that the paper's prototype reads."""


@dataclass(frozen=True)
class Length:
    num_prompt_tokens: int
    num_output_tokens: int

    def scaled(self, scale: float) -> Length:
        """Both lengths times `scale`, at least one token each."""
        return Length(max(round(self.num_prompt_tokens * scale), 1), max(round(self.num_output_tokens * scale), 1))


@dataclass(frozen=True)
class Trace:
    """One of the paper's traces.

    Attributes:
        canvas_length: masks the paper appends to every prompt of this trace (its section 6.1).
    """

    canvas_length: int
    prompt: Callable[[random.Random], float]
    prompt_range: tuple[int, int]
    output: Callable[[random.Random], float]
    output_range: tuple[int, int]


TRACES = {
    "sharegpt": Trace(
        1024,
        lambda rng: rng.gammavariate(0.8123, 6068.7),
        (8, 2048),
        lambda rng: rng.gauss(125.9, 312.4),
        (4, 1024),
    ),
    "arxiv": Trace(
        512,
        lambda rng: rng.gauss(3745.4, 1542.0),
        (16, 3980),
        lambda rng: rng.weibullvariate(191.42, 2.4229),
        (16, 512),
    ),
}


def generate(trace: Trace, seed: int) -> Iterator[Length]:
    """Endless lengths of `trace`, the same for the same seed."""
    rng = random.Random(f"lengths {seed}")
    while True:
        prompt = _truncated(trace.prompt, trace.prompt_range, rng)
        output = _truncated(trace.output, trace.output_range, rng)
        if prompt + output <= MAX_TOTAL:
            yield Length(prompt, output)


def _truncated(draw: Callable[[random.Random], float], bounds: tuple[int, int], rng: random.Random) -> int:
    # By rejection: it needs no inverse of the distribution function, and of every draw here a third or more survive.
    low, high = bounds
    while not low <= (value := draw(rng)) <= high:
        pass
    return round(value)


def read(path: Path) -> list[Length]:
    """The lengths of a CSV file with the columns num_prompt_tokens and num_output_tokens, or as in `_ALIASES`.

    Raises:
        ValueError: no such columns, no rows, or a length that is no positive number.
    """
    csv.field_size_limit(1 << 30)  # the prototype's length traces may hold whole articles
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        columns = next((names for names in _ALIASES if set(names) <= set(table.fieldnames or ())), COLUMNS)
        try:
            lengths = [Length(*(int(row[column]) for column in columns)) for row in table]
        except (KeyError, ValueError, TypeError):
            raise ValueError(f"{path}: expected the columns {' and '.join(COLUMNS)}, whole numbers") from None
    if not lengths or any(min(length.num_prompt_tokens, length.num_output_tokens) < 1 for length in lengths):
        raise ValueError(f"{path}: expected one or more rows of positive lengths")
    return lengths


def shuffled(lengths: Sequence[Length], seed: int) -> Iterator[Length]:
    """Endless draws from a recorded trace: all of it in a seeded order, then again in another."""
    rng = random.Random(f"lengths {seed}")
    while True:
        order = list(lengths)
        rng.shuffle(order)
        yield from order
