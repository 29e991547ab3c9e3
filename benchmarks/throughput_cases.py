"""What `benchmarks.throughput` asks: a model and requests whose answers are of very different lengths."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.models.config import ModelConfig
from backend.models.layers import Transformer
from backend.models.loader import load_model, new_model
from benchmarks import workload
from benchmarks.demo_model.tasks import TASKS
from components.config import DEMO_MODELS
from components.offline import Job

BLOCK = 32
LARGER = ModelConfig(
    architecture="llada", vocab_size=696, embedding_size=696, hidden_size=512, intermediate_size=1536, num_layers=8,
    num_heads=8, num_kv_heads=8, max_position=2048, rms_norm_eps=1e-5, rope_theta=10000.0, mask_token_id=2,
    eos_token_ids=(1,),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model and what it is asked; jobs are made anew for each run."""

    name: str
    model: Transformer
    jobs: Callable[[], Iterator[Job]]


def demo_case(count: int, steps_per_block: int, seed: int) -> Case:
    """The demonstration model's six tasks: answers of 1 to 100 tokens, prompts of 4 to 400."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODELS["demo"] / "tokenizer.json"))
    questions = list(itertools.islice(workload.demo_tasks(list(TASKS), seed), count))
    quota = {"unmasking": "quota", "steps_per_block": steps_per_block} if steps_per_block else {}

    def jobs() -> Iterator[Job]:
        for i, question in enumerate(questions):
            prompt = tokenizer.encode(f"<|user|>{question.prompt}<|assistant|>", add_special_tokens=False).ids
            size = question.max_tokens
            params = SamplingParams(size, size, BLOCK, stop_token_ids=(1,), **quota)  # type: ignore[arg-type]
            yield Job(i, Request(str(i), prompt, params, float(i)))

    how = f"{steps_per_block} steps per block" if steps_per_block else "threshold 0.9"
    return Case(
        f"demonstration model, {how}", load_model(DEMO_MODELS["demo"], torch.float32, torch.device("cpu")), jobs
    )


def larger_case(count: int, steps_per_block: int, seed: int) -> Case:
    """A model of 8 layers, 512 wide, with random weights: lengths of the paper's ShareGPT trace, at an eighth."""
    torch.manual_seed(seed)
    model = new_model(LARGER).eval().requires_grad_(False)
    questions = list(itertools.islice(workload.traced("sharegpt", seed, range(10, 600), scale=0.125), count))

    def jobs() -> Iterator[Job]:
        for i, question in enumerate(questions):
            params = SamplingParams(
                question.max_tokens, 128, BLOCK, unmasking="quota", steps_per_block=steps_per_block or BLOCK
            )
            yield Job(i, Request(str(i), [int(token) for token in question.prompt], params, float(i)))

    return Case(f"8 layers, 512 wide, random, {steps_per_block or BLOCK} steps per block", model, jobs)
