"""The synchronous engine: one model, one scheduler, one step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import torch

from backend.attention.kv_cache import KVCache
from backend.attention.selection import BackendChoice, new_backend, select
from backend.core.page_pool import PagePool
from backend.core.prefill_scheduler import PrefillScheduler, PrefillSchedulerConfig
from backend.core.queries import is_steady
from backend.core.request import Request
from backend.core.scheduler import Scheduler, SchedulerConfig
from backend.core.step import StepPlan, StepResult
from backend.core.synchronized_scheduler import SynchronizedScheduler, SynchronizedSchedulerConfig
from backend.engine.decode_graphs import graph_sizes
from backend.engine.device_runner import MAX_SEATED, DeviceRunner
from backend.engine.kv_memory import bytes_per_token, measure, pool_tokens, step_limits
from backend.engine.model_runner import ModelRunner, Pending
from backend.models.kernels import FlashInferKernels
from backend.models.layers import Transformer
from backend.models.loader import load_model

AnySchedulerConfig = SchedulerConfig | PrefillSchedulerConfig | SynchronizedSchedulerConfig

# torch's attention copies the KV of as many positions as the longest sequence of a graph may have: 0.3 GB
# of LLaDA-8B's at a time, and time that larger batches do not have.
_LARGEST_SDPA_GRAPH, _LONGEST_OF_SDPA = 16, 2048
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
    async_scheduling: whether a step is scheduled and launched while the one before runs; if not said, on a GPU.
    enforce_eager: whether to do without CUDA graphs.
    context_length: prompt + canvas of a request, at most; the model's own if not said. A GPU's memory is
        divided by it.
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
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    context_length: int | None = None


class StepScheduler(Protocol):
    """What the engine asks of a scheduler: see `Scheduler`, `PrefillScheduler` and `SynchronizedScheduler`."""

    pool: PagePool

    @property
    def num_waiting(self) -> int: ...
    @property
    def waiting_tokens(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def can_run_ahead(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> Request | None: ...
    def schedule(self, now: float = 0.0) -> StepPlan | None: ...
    def update(self, plan: StepPlan, result: StepResult) -> list[Request]: ...


@dataclass(frozen=True)
class StepOutput:
    """Attributes:
    plan: what ran, without what had left or was aborted before it ended.
    left: requests that left the engine: ended, failed, or done with their block.
    errors: request id -> why it failed.
    started_at: the `now` of the call that scheduled it.
    """

    plan: StepPlan
    left: Sequence[Request]
    errors: dict[str, str]
    started_at: float


class Engine:
    """Add requests (one block each), then `step()` until they leave. Not thread-safe.

    Args:
        runs_ahead: whether a step is scheduled and launched before the result of the one before is known.
    """

    def __init__(self, runner: ModelRunner, scheduler: StepScheduler, runs_ahead: bool = False) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self._depth = 1 + runs_ahead
        self._running: deque[tuple[StepPlan, Pending, float]] = deque()

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """Loads the checkpoint and allocates the KV pool.

        Raises:
            CheckpointError: see `load_model`.
            AttentionUnavailableError: see `selection.select`.
            KVMemoryError: see `kv_memory.pool_tokens`.
        """
        torch.set_num_threads(config.num_threads)
        return cls.of(load_model(config.model, getattr(torch, config.dtype), torch.device(config.device)), config)

    @classmethod
    def of(cls, model: Transformer, config: EngineConfig) -> Engine:
        """An engine for a model that is loaded, whatever `config` says of where it is. Raises: see `from_config`."""
        dtype, device = getattr(torch, config.dtype), torch.device(config.device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # streams, events and kernels that name no device use this one
        shape = model.config
        longest = min(shape.max_position, config.context_length or shape.max_position)
        attention = select(config.attention_backend, device, dtype, shape.head_dim)
        if attention == "flashinfer":
            model.kernels = FlashInferKernels(shape, device)

        def new_runner(cache: KVCache) -> ModelRunner:
            return ModelRunner(model, cache, new_backend(attention, cache, shape.num_heads))

        tokens = config.kv_cache_tokens
        if tokens == "auto" and device.type == "cuda":
            capped = replace(shape, max_position=longest)
            memory = measure(new_runner, config.scheduler, capped, config.page_size, dtype, device)
            token_bytes = bytes_per_token(shape, dtype)
            tokens = pool_tokens(memory, config.gpu_memory_utilization, token_bytes, config.page_size)
        elif tokens == "auto":
            tokens = CPU_KV_CACHE_TOKENS
        pool = PagePool(-(-tokens // config.page_size), config.page_size)
        cache = KVCache(
            shape.num_layers, pool.num_pages, pool.page_size, shape.num_kv_heads, shape.head_dim, dtype, device
        )
        runner, scheduler = new_runner(cache), config.scheduler
        is_cuda = device.type == "cuda"
        is_async = is_cuda if config.async_scheduling is None else config.async_scheduling
        if is_cuda or is_async:
            if isinstance(scheduler, SchedulerConfig):
                scheduler = replace(scheduler, max_num_seqs=min(scheduler.max_num_seqs, MAX_SEATED))
            most = min(_max_num_seqs(scheduler), MAX_SEATED)
            denoises = not isinstance(scheduler, PrefillSchedulerConfig)
            limits = step_limits(scheduler, longest) if is_cuda else None
            sizes = graph_sizes(most) if is_cuda and denoises and not config.enforce_eager else ()
            if attention == "sdpa":
                sizes, longest = [size for size in sizes if size <= _LARGEST_SDPA_GRAPH], min(longest, _LONGEST_OF_SDPA)
            runner.on_device = DeviceRunner(model, cache, runner.attention, most, sizes, longest, limits)
        return cls(runner, new_scheduler(scheduler, pool, shape.logits_shift, runner.is_plain), is_async)

    def enter(self) -> None:
        """For the thread that steps, where another one made the engine: CUDA's current device is each thread's own."""
        device = self.runner.cache.data.device
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def step(
        self, on_plan: Callable[[StepPlan], Callable[[int], None]] | None = None, now: float = 0.0
    ) -> StepOutput | None:
        """Waits for the end of one step, the next one launched; None when there is nothing to run.

        Args:
            on_plan: called with what is about to run; what it returns is called with each layer whose
                KV is written.
            now: seconds on a clock that only goes forward.
        """
        while len(self._running) < self._depth and (not self._running or self.scheduler.can_run_ahead):
            plan = self.scheduler.schedule(now)
            if plan is None:
                break
            self._running.append((plan, self.runner.launch(plan, on_plan(plan) if on_plan else None), now))
        if not self._running:
            return None
        plan, pending, started_at = self._running.popleft()
        left = self.scheduler.update(plan, pending.result())
        return StepOutput(plan, left, {r.request_id: r.error for r in left if r.error is not None}, started_at)


def new_scheduler(
    config: AnySchedulerConfig,
    pool: PagePool,
    logits_shift: int,
    is_plain: Callable[[Request], bool] = is_steady,
) -> StepScheduler:
    """The scheduler of this configuration's kind, for a model of this `ModelConfig.logits_shift`."""
    if isinstance(config, SchedulerConfig):
        return Scheduler(config, pool, logits_shift, is_plain)
    if isinstance(config, PrefillSchedulerConfig):
        return PrefillScheduler(config, pool)
    return SynchronizedScheduler(config, pool, logits_shift)


def _max_num_seqs(config: AnySchedulerConfig) -> int:
    """Requests of a step, or, of prefills, of all but very short ones: the host chooses the tokens of those beyond."""
    if isinstance(config, SchedulerConfig):
        return config.max_num_seqs
    if isinstance(config, PrefillSchedulerConfig):
        return max(config.max_prefill_tokens // 64, 1)
    return config.batch_size
