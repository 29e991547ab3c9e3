"""Engines of random models, and the requests that measurements run through them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.core.scheduler import SchedulerConfig
from backend.engine.engine import Engine, new_scheduler
from backend.models.config import ModelConfig

BLOCK_LENGTH = 32


def request(
    name: str,
    config: ModelConfig,
    num_prompt_tokens: int,
    canvas_length: int,
    steps_per_block: int,
    *,
    max_tokens: int | None = None,
    arrival: float = 0.0,
    finished_blocks: Sequence[int] = (),
) -> Request:
    """One whose blocks take a given number of forwards each, whatever the model says: its weights are random."""
    params = SamplingParams(
        max_tokens=max_tokens or canvas_length,
        canvas_length=canvas_length,
        block_length=BLOCK_LENGTH,
        unmasking="quota",
        steps_per_block=steps_per_block,
    )
    prompt = [(7 * i + len(name)) % config.mask_token_id for i in range(num_prompt_tokens)]
    return Request(name, prompt, params, arrival, finished_blocks=finished_blocks)


def with_budget(engine: Engine, token_budget: int, max_num_seqs: int, *, runs_ahead: bool = True) -> Engine:
    """The same model, memory and graphs under another scheduler; `engine` must be idle."""
    runner, pool = engine.runner, engine.scheduler.pool
    config = SchedulerConfig(token_budget, max_num_seqs)
    shift = runner.model.config.logits_shift
    return Engine(runner, new_scheduler(config, pool, shift, runner.is_plain), runs_ahead)


def clear(engine: Engine, requests: Sequence[Request]) -> None:
    """Ends what runs and forgets what waits."""
    for request in requests:
        engine.scheduler.abort(request.request_id)
    while engine.step() is not None:
        pass


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
