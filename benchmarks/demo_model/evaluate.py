"""Exact match of a demonstration model per task: `python -m benchmarks.demo_model.evaluate demo-dream`.

Fresh prompts (never those of training: another seed), decoded plainly, without any cache, and
through the engine with the dual cache. Limits: 90% plain overall; the cache may cost 2 points.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.engine.engine import Engine, EngineConfig
from backend.models.layers import Transformer
from benchmarks.demo_model.dense import decode
from benchmarks.demo_model.tasks import MIN_SIZE, TASKS, Example
from benchmarks.demo_model.tokenizer import WordTokenizer
from components.config import DEMO_MODELS, model_directory

# What a request gets that asks for nothing else; the longest answers have 100 tokens.
CANVAS, BLOCK, THRESHOLD = 128, 32, 0.9


def fresh_examples(task: str, count: int, size: float, seed: int) -> list[Example]:
    """`count` examples with sizes spread evenly up to `size`."""
    rng = random.Random(f"evaluation {seed} {task}")
    return [TASKS[task](rng, max(size * rng.random(), MIN_SIZE)) for _ in range(count)]


def plain_answers(model: Transformer, tokenizer: WordTokenizer, examples: Sequence[Example]) -> list[str]:
    """Answers without a cache, 16 examples at a time."""
    answers: list[str] = []
    for start in range(0, len(examples), 16):
        prompts = [tokenizer.prompt(example) for example in examples[start : start + 16]]
        answers += [tokenizer.text(canvas) for canvas in decode(model, prompts, CANVAS, BLOCK, THRESHOLD)]
    return answers


@dataclass(frozen=True)
class Answers:
    """What the engine made of some examples.

    Attributes:
        texts: an answer per example.
        num_tokens: returned, all answers together.
        num_forwards: a forward counts once for each request in it.
        num_positions: what these forwards computed.
    """

    texts: list[str]
    num_tokens: int
    num_forwards: int
    num_positions: int


def engine_answers(engine: Engine, tokenizer: WordTokenizer, examples: Sequence[Example], **options: Any) -> Answers:
    """Answers through the engine, all in flight together; `options` are fields of `SamplingParams`."""
    params = SamplingParams(max_tokens=CANVAS, canvas_length=CANVAS, stop_token_ids=(tokenizer.end,), **options)
    for i, example in enumerate(examples):
        engine.scheduler.add(Request(str(i), tokenizer.prompt(example), params, float(i)))
    tokens: dict[str, list[int]] = {}
    num_forwards = num_positions = 0
    while (output := engine.step()) is not None:
        assert not output.errors, output.errors
        plan = output.plan
        num_forwards += len(plan.prefills) + len(plan.decodes)
        num_positions += sum(request.sequence_length for request in plan.prefills) + plan.decode_tokens
        for request in output.left:
            if request.status.is_finished:
                tokens[request.request_id] = request.answer()[0]
            else:
                request.next_block()
                engine.scheduler.add(request)
    texts = [tokenizer.text(tokens[str(i)]) for i in range(len(examples))]
    return Answers(texts, sum(map(len, tokens.values())), num_forwards, num_positions)


def exact_match(answers: Sequence[str], examples: Sequence[Example]) -> float:
    return sum(a == e.answer for a, e in zip(answers, examples, strict=True)) / len(examples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=model_directory, default=DEMO_MODELS["demo"])
    parser.add_argument("--each", type=int, default=200, help="prompts per task")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    engine = Engine.from_config(EngineConfig(args.model, num_threads=2))
    tokenizer = WordTokenizer()
    print(f"{'task':10} {'plain':>7} {'cached':>7}   ({args.each} prompts each)")
    totals = [0.0, 0.0]
    for task in TASKS:
        examples = fresh_examples(task, args.each, 1.0, args.seed)
        scores = (
            exact_match(plain_answers(engine.runner.model, tokenizer, examples), examples),
            exact_match(engine_answers(engine, tokenizer, examples).texts, examples),
        )
        totals = [total + score / len(TASKS) for total, score in zip(totals, scores, strict=True)]
        print(f"{task:10} {scores[0]:>7.1%} {scores[1]:>7.1%}", flush=True)
    print(f"{'overall':10} {totals[0]:>7.1%} {totals[1]:>7.1%}")


if __name__ == "__main__":
    main()
