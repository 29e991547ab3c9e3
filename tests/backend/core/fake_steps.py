"""Requests of blocks of four tokens, and forwards that commit without a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from backend.core.logprobs import TokenLogprobs
from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.core.step import StepPlan, StepResult

BLOCK = 4
EOS = 9


def make(
    name: str,
    prompt: int = 12,
    canvas: int = BLOCK,
    arrival: float = 0.0,
    *,
    finished_blocks: Sequence[int] = (),
    attempt: int = 1,
    prefilled: Sequence[tuple[int, int]] | None = None,
    prefilled_logprobs: Sequence[TokenLogprobs] = (),
    **options: Any,
) -> Request:
    """By default 16 tokens, which is 4 pages of 4; with `prefilled` its KV lies elsewhere."""
    params = SamplingParams(canvas, canvas, BLOCK, steps_per_block=1, stop_token_ids=(EOS,), **options)
    return Request(
        name, [0] * prompt, params, arrival, finished_blocks=finished_blocks, attempt=attempt,
        prefilled=prefilled, prefilled_logprobs=prefilled_logprobs,
    )  # fmt: skip


def one_each(plan: StepPlan) -> StepResult:
    """Every request commits its leftmost masked position."""
    return StepResult([[(r.block.tokens.index(None), 1)] for r in (*plan.prefills, *plan.decodes)])


def some_each(plan: StepPlan, rng: Random, *, ends: float = 0.05, fails: float = 0.02) -> StepResult:
    """Every request commits some positions; some of them end the answer, and some requests fail."""
    commits, errors = [], {}
    for request in (*plan.prefills, *plan.decodes):
        masked = [i for i, token in enumerate(request.block.tokens) if token is None]
        chosen = rng.sample(masked, rng.randint(1, len(masked)))
        commits.append([(i, EOS if rng.random() < ends else 1) for i in chosen])
        if rng.random() < fails:
            errors[request.request_id] = "broken"
    return StepResult(commits, errors)


def names(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]
