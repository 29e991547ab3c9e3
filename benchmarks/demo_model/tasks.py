"""Tasks whose answers can be checked: what the demonstration model is trained on and measured by.

Every task draws a prompt and its one right answer from a `random.Random`. `size` in (0, 1] scales
the length of lists and ranges, so that training may start short. Standard library only.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

WORDS = (
    "acorn air angel ant apple arch arm art ash ball bank barn bay bean bear bed bee bell berry bird "
    "boat bone book boot bowl box brain bread brick bus cabin cake camel camp card cart castle cat cave "
    "chair chest cliff clock cloud coal coat coin corn cow crab crown cup deer desk dice dog door dove "
    "dream drum duck dust eagle ear earth egg elbow elm fan farm fence fern fig film fire fish flag flour "
    "flute fog fork fox frog fruit gate ghost gift glass glove goat gold grape grass gull ham hand hat "
    "hawk heart hill honey horn horse house ice ink iron island jam jar jewel juice key king kite knee "
    "knife lace lake lamp leaf lemon light lily lion lock map maple mask meat milk mill mint moon moss "
    "mouse nail nest net night north nut oak ocean olive onion otter oven owl palm paper pear pen piano"
).split()

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = ["", "", *"twenty thirty forty fifty sixty seventy eighty ninety".split()]
MAX_NUMBER = 99
MAX_NUMBER_IN_WORDS = 199
MIN_SIZE = 0.06
MAX_LISTED = 400


@dataclass(frozen=True)
class Example:
    task: str
    prompt: str
    answer: str


def number_in_words(n: int) -> str:
    """`n` in 0..199 in English words."""
    if n >= 100:
        rest = n - 100
        return "one hundred" + (f" {number_in_words(rest)}" if rest else "")
    if n < 20:
        return ONES[n]
    return TENS[n // 10] + (f" {ONES[n % 10]}" if n % 10 else "")


def count(rng: random.Random, size: float) -> Example:
    """Counting up: decode-heavy, the answer runs over several blocks."""
    first = rng.randint(0, 9)
    last = first + rng.randint(2, max(3, int((MAX_NUMBER - first) * size)))
    answer = " ".join(str(n) for n in range(first, last + 1))
    return Example("count", f"count from {first} to {last}", answer)


def first(rng: random.Random, size: float) -> Example:
    """The first few of a long list: prefill-heavy, a long prompt and a short answer."""
    items = [rng.choice(WORDS) for _ in range(rng.randint(3, max(4, int(MAX_LISTED * size))))]
    wanted = rng.randint(1, min(9, len(items)))
    return Example("first", f"first {wanted} of: {' '.join(items)}", " ".join(items[:wanted]))


def spell(rng: random.Random, size: float) -> Example:
    word = rng.choice(WORDS)
    return Example("spell", f"spell {word}", " ".join(word))


def say(rng: random.Random, size: float) -> Example:
    n = rng.randint(0, MAX_NUMBER_IN_WORDS)
    return Example("say", f"write {n} in words", number_in_words(n))


def add(rng: random.Random, size: float) -> Example:
    a, b = rng.randint(0, 90), rng.randint(0, 9)
    return Example("add", f"what is {a} plus {b}?", str(a + b))


def repeat(rng: random.Random, size: float) -> Example:
    """Copying a numbered list: a long prompt and an answer of several blocks."""
    items = [rng.choice(WORDS) for _ in range(rng.randint(2, max(3, int(50 * size))))]
    listing = " ".join(f"{i} {item}" for i, item in enumerate(items, 1))
    return Example("repeat", f"repeat: {listing}", listing)


TASKS: dict[str, Callable[[random.Random, float], Example]] = {
    "count": count,
    "first": first,
    "spell": spell,
    "say": say,
    "add": add,
    "repeat": repeat,
}
