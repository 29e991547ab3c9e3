"""The synchronous engine: one model, one scheduler, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from backend.attention.kv_cache import KVCache
from backend.attention.selection import BackendChoice, new_backend, select
from backend.core.page_pool import PagePool
from backend.core.prefill_scheduler import PrefillScheduler, PrefillSchedulerConfig
from backend.core.request import Request
from backend.core.scheduler import Scheduler, SchedulerConfig
from backend.core.step import StepPlan, StepResult
from backend.core.synchronized_scheduler import SynchronizedScheduler, SynchronizedSchedulerConfig
from backend.engine.kv_memory import bytes_per_token, measure, pool_tokens
from backend.engine.model_runner import ModelRunner
from backend.models.kernels import FlashInferKernels
from backend.models.loader import load_model

AnySchedulerConfig = SchedulerConfig | PrefillSchedulerConfig | SynchronizedSchedulerConfig

# What `kv_cache_tokens: auto` is where there is no GPU whose memory could be filled.
CPU_KV_CACHE_TOKENS = 65_536


@dataclass(frozen=True)
class EngineConfig:
    """Attributes:
    scheduler: its kind makes a colocated worker's engine, a prefill worker's or a baseline.
    kv_cache_tokens: capacity of the KV pool in tokens, rounded up to whole pages; "auto" on a GPU: what
        `gpu_memory_utilization` of its memory leaves beside the weights and the largest step.
    num_threads: CPU threads of the forward.
    attention_backend: see `selection.select`; the model's kernels follow it.
    """

    model: Path
    scheduler: AnySchedulerConfig = SchedulerConfig(token_budget=2048, max_num_seqs=64)
    page_size: int = 16
    kv_cache_tokens: int | Literal["auto"] = "auto"
    dtype: str = "float32"
    device: str = "cpu"
    num_threads: int = 1
    attention_backend: BackendChoice = "auto"
    gpu_memory_utilization: float = 0.9


class StepScheduler(Protocol):
    """What the engine asks of a scheduler: see `Scheduler`, `PrefillScheduler` and `SynchronizedScheduler`."""

    pool: PagePool

    @property
    def num_waiting(self) -> int: ...
    @property
    def waiting_tokens(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> Request | None: ...
    def schedule(self, now: float = 0.0) -> StepPlan | None: ...
    def update(self, plan: StepPlan, result: StepResult) -> list[Request]: ...


@dataclass(frozen=True)
class StepOutput:
    """Attributes:
    plan: what ran.
    left: requests that left the engine: ended, failed, or done with their block.
    errors: request id -> why it failed.
    """

    plan: StepPlan
    left: Sequence[Request]
    errors: dict[str, str]


class Engine:
    """Add requests (one block each), then `step()` until they leave. Not thread-safe."""

    def __init__(self, runner: ModelRunner, scheduler: StepScheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """Loads the checkpoint and allocates the KV pool.

        Raises:
            CheckpointError: see `load_model`.
            AttentionUnavailableError: see `selection.select`.
            KVMemoryError: see `kv_memory.pool_tokens`.
        """
        torch.set_num_threads(config.num_threads)
        dtype, device = getattr(torch, config.dtype), torch.device(config.device)
        model = load_model(config.model, dtype, device)
        shape = model.config
        attention = select(config.attention_backend, device, dtype, shape.head_dim)
        if attention == "flashinfer":
            model.kernels = FlashInferKernels(shape, device)

        def new_runner(cache: KVCache) -> ModelRunner:
            return ModelRunner(model, cache, new_backend(attention, cache, shape.num_heads))

        tokens = config.kv_cache_tokens
        if tokens == "auto" and device.type == "cuda":
            memory = measure(new_runner, config.scheduler, shape, config.page_size, dtype, device)
            token_bytes = bytes_per_token(shape, dtype)
            tokens = pool_tokens(memory, config.gpu_memory_utilization, token_bytes, config.page_size)
        elif tokens == "auto":
            tokens = CPU_KV_CACHE_TOKENS
        pool = PagePool(-(-tokens // config.page_size), config.page_size)
        cache = KVCache(
            shape.num_layers, pool.num_pages, pool.page_size, shape.num_kv_heads, shape.head_dim, dtype, device
        )
        return cls(new_runner(cache), new_scheduler(config.scheduler, pool, shape.logits_shift))

    def step(
        self, on_plan: Callable[[StepPlan], Callable[[int], None]] | None = None, now: float = 0.0
    ) -> StepOutput | None:
        """Runs one step; None when there is nothing to run.

        Args:
            on_plan: called with what is about to run; what it returns is called with each layer whose
                KV is written.
            now: seconds on a clock that only goes forward, for schedulers that wait.
        """
        plan = self.scheduler.schedule(now)
        if plan is None:
            return None
        result = self.runner.run(plan, on_plan(plan) if on_plan else None)
        left = self.scheduler.update(plan, result)
        return StepOutput(plan, left, {r.request_id: r.error for r in left if r.error is not None})


def new_scheduler(config: AnySchedulerConfig, pool: PagePool, logits_shift: int) -> StepScheduler:
    """The scheduler of this configuration's kind, for a model of this `ModelConfig.logits_shift`."""
    if isinstance(config, SchedulerConfig):
        return Scheduler(config, pool, logits_shift)
    if isinstance(config, PrefillSchedulerConfig):
        return PrefillScheduler(config, pool)
    return SynchronizedScheduler(config, pool, logits_shift)
