"""The parts that the models share. Shapes: T packed tokens, D hidden size, H heads, K KV heads, E head size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from backend.attention.base import Attention
from backend.models.config import ModelConfig
from backend.models.kernels import Kernels, TorchKernels


class RMSNorm(nn.Module):
    """Root-mean-square norm of the residual stream."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """Adds `x` [T, D] to the residual stream [T, D], which it begins if there is none: its norm, and itself."""
        if residual is None:
            return kernels.rms_norm(x, self.weight, self.eps), x
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Bidirectional attention; the KV cache and the masks are the `Attention`'s business."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.qkv_proj = nn.Linear(hidden, (heads + 2 * kv_heads) * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, rotary: Any, layer: int, attention: Attention, kernels: Kernels) -> Tensor:
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)  # [T, H + 2K, E]
        query, key = kernels.rotate(qkv, self.heads, self.kv_heads, rotary)
        value = qkv[:, self.heads + self.kv_heads :]
        return self.out_proj(attention.attend(layer, query, key, value).flatten(1))


class GatedMLP(nn.Module):
    """SwiGLU with gate and up projections in one matrix."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor, kernels: Kernels) -> Tensor:  # [T, D]
        return self.down_proj(kernels.silu_mul(self.gate_up_proj(x)))


class Block(nn.Module):
    def __init__(self, hidden: int, intermediate: int, heads: int, kv_heads: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden, eps)
        self.attention = SelfAttention(hidden, heads, kv_heads, bias)
        self.mlp_norm = RMSNorm(hidden, eps)
        self.mlp = GatedMLP(hidden, intermediate)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotary: Any, layer: int, attention: Attention, kernels: Kernels
    ) -> tuple[Tensor, Tensor]:
        """What it adds to the residual stream, and the stream before that."""
        x, residual = self.attention_norm(x, residual, kernels)
        x, residual = self.mlp_norm(self.attention(x, rotary, layer, attention, kernels), residual, kernels)
        return self.mlp(x, kernels), residual


class Transformer(nn.Module):
    """Embedding, blocks, final norm and head: all of LLaDA and of Dream but what tells them apart.

    Args:
        qkv_bias: whether the query, key and value projections have one.

    Attributes:
        kernels: torch's; others may be put in their place.
    """

    def __init__(self, config: ModelConfig, qkv_bias: bool) -> None:
        super().__init__()
        self.config = config
        self.kernels: Kernels = TorchKernels(config)
        self.embedding = nn.Embedding(config.embedding_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            Block(
                config.hidden_size,
                config.intermediate_size,
                config.num_heads,
                config.num_kv_heads,
                config.rms_norm_eps,
                qkv_bias,
            )
            for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.embedding_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, D] of packed `token_ids` [T] at absolute `positions` [T]."""
        x, residual = self.embedding(token_ids), None
        rotary = self.kernels.rotary(positions)
        for layer, block in enumerate(self.blocks):
            x, residual = block(x, residual, rotary, layer, attention, self.kernels)
        return self.norm(x, residual, self.kernels)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of chosen rows of the hidden states [N, D], V embedding rows.

        Which position a row predicts is `ModelConfig.logits_shift`'s to say.
        """
        return self.lm_head(hidden)
