"""What a process that loads a checkpoint makes of its configuration and tells others of the model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from backend.engine.engine import AnySchedulerConfig, EngineConfig
from backend.models.config import ModelConfig
from components.config import ColocatedWorkerConfig, WorkerConfig
from components.protocol import ModelCard


def engine_config(config: WorkerConfig, scheduler: AnySchedulerConfig) -> EngineConfig:
    """The engine of a worker's configuration, on this machine."""
    device, dtype = config.device, config.dtype
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    return EngineConfig(
        config.model,
        scheduler,
        config.page_size,
        config.kv_cache_tokens,
        dtype,
        device,
        config.num_threads,
        config.attention_backend,
        config.gpu_memory_utilization,
        config.async_scheduling if isinstance(config, ColocatedWorkerConfig) else None,
        config.enforce_eager,
        config.context_length,
    )


def model_card(directory: Path, config: ModelConfig, dtype: str) -> ModelCard:
    """The card of a loaded checkpoint; its fingerprint covers the configuration and the weights' headers."""
    digest = hashlib.sha256(dtype.encode())
    for path in sorted((*directory.glob("config.json"), *directory.glob("*.safetensors"))):
        with path.open("rb") as file:
            digest.update(path.name.encode() + str(path.stat().st_size).encode() + file.read(1 << 20))
    return ModelCard(
        digest.hexdigest()[:16],
        config.vocab_size,
        config.mask_token_id,
        config.eos_token_ids,
        config.max_position,
        config.defaults,
    )
