"""Which attention, and with it which kernels, a worker uses."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from backend.attention import flashinfer
from backend.attention.base import AttentionBackend, AttentionUnavailableError
from backend.attention.kv_cache import KVCache
from backend.attention.sdpa import SdpaBackend

log = logging.getLogger(__name__)

BackendName = Literal["flashinfer", "sdpa"]
BackendChoice = Literal["auto", "flashinfer", "sdpa"]


def select(choice: BackendChoice, device: torch.device, dtype: torch.dtype, head_dim: int) -> BackendName:
    """What `choice` comes to on a device: FlashInfer wherever it runs, torch's SDPA elsewhere, if it is "auto".

    Raises:
        AttentionUnavailableError: FlashInfer was asked for and cannot run.
    """
    if choice == "sdpa":
        return "sdpa"
    reason = flashinfer.why_unavailable(device, dtype, head_dim)
    if reason is None:
        selected: BackendName = "flashinfer"
    elif choice == "flashinfer":
        raise AttentionUnavailableError(f"attention_backend=flashinfer: {reason}")
    else:
        selected = "sdpa"
    if device.type == "cuda":
        log.info("attention_backend=%s%s", selected, f": no FlashInfer, {reason}" if reason else "")
    return selected


def new_backend(name: BackendName, cache: KVCache, num_heads: int) -> AttentionBackend:
    """The backend of that name over a cache, for a model with `num_heads` query heads."""
    return flashinfer.FlashInferBackend(cache, num_heads) if name == "flashinfer" else SdpaBackend(cache)
