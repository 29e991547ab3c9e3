"""Shapes of models and numbers of GPUs, from the data files beside this module."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).parent / "data"
_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Model:
    """A transformer's shape; bfloat16 weights and KV."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    vocab: int

    @property
    def layer_params(self) -> int:
        """Of all layers, without embedding and LM head."""
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.width * self.ffn_width)

    @property
    def weight_bytes(self) -> int:
        return _BYTES * (self.layer_params + 2 * self.width * self.vocab)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES


@dataclass(frozen=True)
class GPU:
    """Peak numbers; `link_gb_per_s` is one direction between two GPUs."""

    tflops: float
    memory_gb: float
    memory_tb_per_s: float
    link_gb_per_s: float

    @property
    def flops(self) -> float:
        return self.tflops * 1e12

    @property
    def bytes_per_s(self) -> float:
        return self.memory_tb_per_s * 1e12


def kv_cache_tokens(model: Model, gpu: GPU, page_size: int) -> int:
    """Tokens of whole pages in 90% of the memory, less the weights and 4 GB for activations and logits.

    Raises:
        ValueError: the weights do not fit.
    """
    room = int((0.9e9 * gpu.memory_gb - model.weight_bytes - 4e9) // model.kv_bytes_per_token)
    if room < page_size:
        raise ValueError(f"{model.weight_bytes / 1e9:.1f} GB of weights leave no room for KV in {gpu.memory_gb:g} GB")
    return room // page_size * page_size


@cache
def models() -> dict[str, Model]:
    return {name: Model(**shape) for name, shape in read("models.yaml").items()}


@cache
def gpus() -> dict[str, GPU]:
    return {name: GPU(**numbers) for name, numbers in read("gpus.yaml").items()}


def read(name: str) -> dict[str, Any]:
    """A data file."""
    document: dict[str, Any] = yaml.safe_load((DATA / name).read_text())
    return document
