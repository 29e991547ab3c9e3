"""The small operations between a model's matrices, by torch or by FlashInfer.

Both compute in float32. torch rounds as the reference models do; FlashInfer rounds once at the end of each
operation: a norm without rounding before its weight, SwiGLU without rounding between SiLU and product, and
`add_rms_norm` takes the norm of the sum before it is rounded. Shapes as in `layers`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from backend.models.config import ModelConfig


class Kernels(Protocol):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x` [T, D] over its root mean square, times `weight` [D]."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of `residual + x`, and this sum. Both arguments [T, D] may be overwritten."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """SiLU of the first half of `gate_up` [T, 2I] times the second half: [T, I]."""
        ...

    def rotary(self, positions: Tensor) -> Any:
        """What `rotate` needs to know of `positions` [T]: once per forward."""
        ...

    def rotate(self, qkv: Tensor, heads: int, kv_heads: int, rotary: Any) -> tuple[Tensor, Tensor]:
        """The rotated queries and keys of `qkv` [T, H + 2K, E], which may be overwritten."""
        ...


class TorchKernels:
    """See `Kernels`. Any device."""

    def __init__(self, config: ModelConfig) -> None:
        self._head_dim, self._theta = config.head_dim, config.rope_theta

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_table(positions, self._head_dim, self._theta)

    def rotate(self, qkv: Tensor, heads: int, kv_heads: int, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        query, key = rotate(qkv[:, : heads + kv_heads], *rotary).split((heads, kv_heads), dim=1)
        return query, key


class FlashInferKernels:
    """See `Kernels`. CUDA, bfloat16 and float16."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        import flashinfer

        self._flashinfer: Any = flashinfer
        # Not FlashInfer's frequencies, which are rounded otherwise: see `rotary_table`.
        cos, sin = rotary_table(torch.arange(config.max_position, device=device), config.head_dim, config.rope_theta)
        half = config.head_dim // 2
        self._cos_sin = torch.cat((cos[:, 0, :half], sin[:, 0, :half]), dim=-1)  # [positions, E]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._flashinfer.rmsnorm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        self._flashinfer.fused_add_rmsnorm(x, residual, weight, eps)
        return x, residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._flashinfer.silu_and_mul(gate_up)

    def rotary(self, positions: Tensor) -> Tensor:
        return positions

    def rotate(self, qkv: Tensor, heads: int, kv_heads: int, rotary: Tensor) -> tuple[Tensor, Tensor]:
        query, key = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(
            rotary, query.flatten(1), key.flatten(1), qkv.shape[-1], self._cos_sin
        )
        return query, key


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `positions` [T]: two float32 tensors [T, 1, E]."""
    # In just this order: at position 100 another rounding of a frequency already shows in the logits.
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions.float()[:, None] * inverse  # [T, E/2]
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x` [T, H, E], in float32 (the reference's `rope_full_precision`)."""
    full = x.float()
    first, second = full.chunk(2, dim=-1)
    return (full * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
