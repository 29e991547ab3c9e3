"""Training batches: answers with part of their canvas masked. R rows of S tokens, left-padded."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.demo_model.tasks import MIN_SIZE, TASKS
from benchmarks.demo_model.tokenizer import WordTokenizer

BLOCK = 32
TOKENS_PER_STEP = 2400
PADDING_WEIGHT = 0.1  # of the loss on end-of-text after the first


@dataclass(frozen=True)
class Batch:
    """`masked` and `target` int64 [R, S], `weight` float [R, S], `lengths` int64 [R], the rows' `tasks`."""

    masked: Tensor
    target: Tensor
    weight: Tensor
    lengths: Tensor
    tasks: list[str]


def make_batch(
    tokenizer: WordTokenizer, rng: random.Random, shares: Mapping[str, float], sizes: Mapping[str, float]
) -> Batch:
    """A batch of one canvas length; tasks drawn by `shares`, their lengths up to `sizes`.

    The part before a random block is clean, the block is masked at a random ratio and all after it
    is masked: what blockwise decoding shows the model. A quarter of the rows are masked uniformly
    over the whole canvas instead (LLaDA, equation 3). Ratios are spread evenly over the rows.
    """
    canvas = BLOCK * rng.choices((1, 2, 3, 4, 8), (10, 3, 2, 2, 0.2))[0]
    samples: list[tuple[list[int], list[int], str]] = []
    longest = 0
    while True:
        name = rng.choices(list(shares), list(shares.values()))[0]
        example = TASKS[name](rng, max(sizes[name] * rng.random(), MIN_SIZE))
        prompt, answer = tokenizer.prompt(example), tokenizer.answer(example)
        if len(answer) >= canvas:
            continue
        if (max(longest, len(prompt)) + canvas) * (len(samples) + 1) > TOKENS_PER_STEP and len(samples) >= 8:
            break
        longest = max(longest, len(prompt))
        samples.append((prompt, answer, name))
    shape = (len(samples), longest + canvas)
    target = torch.full(shape, tokenizer.end)
    weight = torch.zeros(shape)
    is_masked = torch.zeros(shape, dtype=torch.bool)
    noise = torch.rand(len(samples), canvas, generator=torch.Generator().manual_seed(rng.getrandbits(60)))
    spread = rng.random()
    for row, (prompt, answer, _) in enumerate(samples):
        target[row, longest - len(prompt) : longest] = torch.tensor(prompt)
        target[row, longest : longest + len(answer)] = torch.tensor(answer)
        ratio = 1.0 if rng.random() < 0.25 else (spread + row / len(samples)) % 1.0
        dropped = noise[row] < ratio
        scored = dropped
        if rng.random() >= 0.25:
            first = rng.randrange(len(answer) // BLOCK + 1) * BLOCK
            block = torch.arange(canvas) // BLOCK == first // BLOCK
            scored = dropped & block
            dropped = scored | (torch.arange(canvas) >= first + BLOCK)
        is_masked[row, longest:] = dropped
        weight[row, longest:] = scored.float()
        weight[row, longest + len(answer) + 1 :] *= PADDING_WEIGHT
        # Between a vote per token and a vote per answer: short answers would hardly count, or long ones.
        weight[row] /= weight[row].sum().clamp(min=1e-3).sqrt()
    lengths = torch.tensor([len(prompt) + canvas for prompt, _, _ in samples])
    masked = target.masked_fill(is_masked, tokenizer.mask)
    return Batch(masked, target, weight, lengths, [task for _, _, task in samples])
