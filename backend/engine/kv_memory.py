"""How many tokens of KV a GPU has room for: what is left when the largest step has what it needs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from backend.attention.kv_cache import KVCache
from backend.core.auto_budget import JOINED_TOKENS
from backend.core.prefill_scheduler import PrefillSchedulerConfig
from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.core.scheduler import SchedulerConfig
from backend.core.step import StepPlan
from backend.engine.model_runner import ModelRunner
from backend.engine.step_limits import StepLimits
from backend.models.config import ModelConfig

if TYPE_CHECKING:
    from backend.engine.engine import AnySchedulerConfig

log = logging.getLogger(__name__)

BLOCK_LENGTH = SamplingParams.block_length
# Tokens of the prefill that is measured; a larger one needs more in proportion.
_MEASURED_TOKENS = 8192


class KVMemoryError(RuntimeError):
    """The GPU has no room for a KV pool; the message says what takes it."""


@dataclass(frozen=True)
class GPUMemory:
    """In bytes.

    Attributes:
        total, free: of the GPU, whoever uses it.
        weights: allocated by this process: the model.
        activations: what the largest step allocates beside, at its peak.
    """

    total: int
    free: int
    weights: int
    activations: int


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of keys and values, all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def pool_tokens(memory: GPUMemory, utilization: float, token_bytes: int, page_size: int) -> int:
    """Tokens of whole pages in what `utilization` of the GPU's memory leaves, the scratch page paid for.

    The rest is for what is not measured: the CUDA context, graphs, options of sampling that need more than
    the default ones, fragmentation.

    Raises:
        KVMemoryError: there is no room, or other processes have it.
    """
    room = int(utilization * memory.total) - memory.weights - memory.activations
    num_pages = room // (page_size * token_bytes) - 1
    used = f"{memory.weights / 1e9:.1f} GB of weights and {memory.activations / 1e9:.1f} GB for the largest step"
    if num_pages < 1:
        raise KVMemoryError(
            f"{used} leave no room for KV in gpu_memory_utilization={utilization:g} of {memory.total / 1e9:.1f} GB"
        )
    if room + memory.activations > memory.free:
        raise KVMemoryError(
            f"only {memory.free / 1e9:.1f} GB of the GPU are free, others use it: {room / 1e9:.1f} GB for KV would be "
            f"gpu_memory_utilization={utilization:g} of {memory.total / 1e9:.1f} GB less {used}"
        )
    return num_pages * page_size


def largest_steps(scheduler: AnySchedulerConfig, config: ModelConfig) -> tuple[StepPlan, StepPlan | None, float]:
    """The two halves of the largest step: what it prefills, and the blocks that it denoises, if any.

    Only their shapes matter: all their tokens lie in page 0. The last number is how many times as many
    tokens as in the first plan the largest step prefills.
    """
    longest = config.max_position
    num_tokens, num_blocks = _largest(scheduler, longest)
    measured = min(num_tokens, _MEASURED_TOKENS)
    lengths = [longest] * (measured // longest) + [measured % longest] * (measured % longest > 0)
    prefills = [_request(f"prefill {i}", max(length, BLOCK_LENGTH)) for i, length in enumerate(lengths)]
    blocks = [_request(f"block {i}", BLOCK_LENGTH) for i in range(num_blocks)]
    for request in blocks:
        request.commit([])  # beyond its prefill
    scale = max(num_tokens / sum(request.sequence_length for request in prefills), 1.0)
    return StepPlan(prefills, []), StepPlan([], blocks) if blocks else None, scale


def step_limits(scheduler: AnySchedulerConfig, longest: int) -> StepLimits | None:
    """What the largest step was measured for, in sequences of up to `longest` tokens; None where clients cannot
    ask for more: prefills alone have the tokens that they have.
    """
    num_tokens, num_blocks = _largest(scheduler, longest)
    num_positions = num_blocks * BLOCK_LENGTH
    return StepLimits(num_tokens + num_positions, num_positions) if num_blocks else None


def _largest(scheduler: AnySchedulerConfig, longest: int) -> tuple[int, int]:
    """Prefill tokens and blocks of 32 of the largest step."""
    if isinstance(scheduler, SchedulerConfig):
        # What `TokenBudget` saves while small prefills trickle in is up to another budget and the longest of them.
        budget = JOINED_TOKENS if scheduler.token_budget == "auto" else 2 * scheduler.token_budget
        return min(budget + longest, scheduler.max_num_seqs * longest), scheduler.max_num_seqs
    if isinstance(scheduler, PrefillSchedulerConfig):
        return max(scheduler.max_prefill_tokens, longest), 0
    return scheduler.batch_size * longest, scheduler.batch_size


def _request(name: str, length: int) -> Request:
    request = Request(name, [0] * (length - BLOCK_LENGTH), SamplingParams(BLOCK_LENGTH, BLOCK_LENGTH), 0.0)
    request.pages = [0] * length  # as many as it needs and more
    return request


def measure(
    new_runner: Callable[[KVCache], ModelRunner],
    scheduler: AnySchedulerConfig,
    config: ModelConfig,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> GPUMemory:
    """Runs the largest step over a cache of one page, on a GPU that holds nothing but the model yet.

    Args:
        config: the model's; its `max_position` is the longest prompt + canvas that there will be.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_allocated(device)
    cache = KVCache(config.num_layers, 1, page_size, config.num_kv_heads, config.head_dim, dtype, device)
    steps = largest_steps(scheduler, config)
    memory = GPUMemory(total, free, weights, _activations(new_runner(cache), steps, weights, device))
    log.info("GPU memory: %s", memory)
    return memory


def _activations(
    runner: ModelRunner, steps: tuple[StepPlan, StepPlan | None, float], weights: int, device: torch.device
) -> int:
    fixed = torch.cuda.memory_allocated(device) - weights
    prefills, blocks, scale = steps
    needed = fixed + int(scale * _peak(runner, prefills, device))
    return needed + (_peak(runner, blocks, device) if blocks else 0)


def _peak(runner: ModelRunner, plan: StepPlan, device: torch.device) -> int:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.run(plan)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
