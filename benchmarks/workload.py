"""What is asked of a server, as plain data: requests with arrival times, and how they are to be denoised.

Everything is drawn from a seed. What request number i asks depends on the seed and i alone, not on when
it arrives: every load of a sweep, and every server compared in it, gets the same questions.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import lengths
from benchmarks.demo_model.tasks import MIN_SIZE, TASKS, WORDS
from benchmarks.lengths import Length

TASK_MAX_TOKENS = 128
"""Answers of the demonstration model's tasks have at most 100 tokens."""


@dataclass(frozen=True)
class Question:
    """One request.

    Attributes:
        arrival_s: when it is to be sent, from the start of the run; 0 in a closed loop, which has no such time.
        prompt: a user's message, or token ids that go in as they are.
        task: what kind of request it is, to tell kinds apart in results.
        answer: the one right answer where there is one, else empty.
    """

    prompt: str | tuple[int, ...]
    max_tokens: int
    task: str
    answer: str = ""
    arrival_s: float = 0.0


@dataclass(frozen=True)
class Decoding:
    """How all requests of a workload are denoised; what is None is left to the server.

    Attributes:
        ignore_eos: answers have exactly max_tokens tokens (mode "fixed length"); else they end with the
            model's end of text (mode "end of text"). The two are not comparable.
        steps_per_block: forwards a block takes, commits evenly spread (`unmasking: quota`). None: every
            step commits what the model is sure of (`unmasking: threshold`).
    """

    ignore_eos: bool = False
    canvas_length: int | None = None
    block_length: int | None = None
    steps_per_block: int | None = None
    confidence_threshold: float | None = None

    @property
    def mode(self) -> str:
        return "fixed length" if self.ignore_eos else "end of text"

    def annotations(self) -> list[str]:
        """The options as Sangam's OpenAI API takes them (`nvext.annotations`)."""
        names = ("canvas_length", "block_length", "steps_per_block", "confidence_threshold")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.steps_per_block is not None:
            given["unmasking"] = "quota"
        return [f"dllm.{name}:{value}" for name, value in given.items()]


def demo_tasks(names: Sequence[str], seed: int, *, list_words: int = 0) -> Iterator[Question]:
    """Endless questions the demonstration model can answer, of all sizes, the tasks in turn.

    Args:
        list_words: lengthens the lists of the task `first` to this many words, which does not change the
            answers: prefills become heavy. The model was trained on lists of up to 400; no other task's
            prompt can be lengthened without leaving what the model knows.

    Raises:
        ValueError: no such task.
    """
    if unknown := set(names) - TASKS.keys():
        raise ValueError(f"no task {sorted(unknown)}; there are {', '.join(TASKS)}")
    for index, name in enumerate(itertools.cycle(names)):
        rng = random.Random(f"question {seed} {index}")
        example = TASKS[name](rng, max(rng.random(), MIN_SIZE))
        prompt = example.prompt
        if name == "first":
            num_missing = list_words - len(prompt.partition(":")[2].split())
            prompt = " ".join([prompt, *(rng.choice(WORDS) for _ in range(num_missing))])
        yield Question(prompt, TASK_MAX_TOKENS, name, example.answer)


def token_prompts(drawn: Iterator[Length], task: str, seed: int, ids: range) -> Iterator[Question]:
    """Questions of given lengths: prompts of random token ids. Nothing is right or wrong about the answers."""
    for index, length in enumerate(drawn):
        rng = random.Random(f"question {seed} {index}")
        yield Question(tuple(rng.choices(ids, k=length.num_prompt_tokens)), length.num_output_tokens, task)


def traced(name: str, seed: int, ids: range, *, scale: float = 1.0, max_total: int | None = None) -> Iterator[Question]:
    """Questions with the lengths of a trace: see `trace_lengths`."""
    return token_prompts(trace_lengths(name, seed, scale=scale, max_total=max_total), Path(name).stem, seed, ids)


def trace_lengths(
    name: str, seed: int, *, scale: float = 1.0, max_total: int | None = None, in_order: bool = False
) -> Iterator[Length]:
    """The lengths of a trace, endless.

    Args:
        name: `sharegpt` or `arxiv` (generators of the paper's Table 1), or the path of a CSV file.
        scale: all lengths are multiplied by this, for models with a short context.
        max_total: pairs of more prompt + output tokens (after scaling) are left out; None keeps all.
        in_order: a file's rows as they come, not in a seeded order.

    Raises:
        ValueError: see `lengths.read`; or no pair of a CSV file is as short as `max_total`.
    """
    if name in lengths.TRACES:
        drawn = lengths.generate(lengths.TRACES[name], seed)
    else:
        recorded = lengths.read(Path(name))
        if max_total and all(_total(length.scaled(scale)) > max_total for length in recorded):
            raise ValueError(f"{name}: every row is over {max_total} tokens")
        drawn = itertools.cycle(recorded) if in_order else lengths.shuffled(recorded, seed)
    scaled = (length.scaled(scale) for length in drawn)
    return (length for length in scaled if not max_total or _total(length) <= max_total)


def _total(length: Length) -> int:
    return length.num_prompt_tokens + length.num_output_tokens


def at(times: Sequence[float], questions: Iterator[Question]) -> list[Question]:
    """One question per arrival time."""
    return [replace(question, arrival_s=time) for time, question in zip(times, questions, strict=False)]
