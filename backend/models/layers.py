"""The parts that the models share. Shapes: T packed tokens, D hidden size, H heads, K KV heads, E head size."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from backend.attention.base import Attention
from backend.models.config import ModelConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 as the reference models do."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [T, D]
        return functional.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype) * self.weight


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


class SelfAttention(nn.Module):
    """Bidirectional attention; the KV cache and the masks are the `Attention`'s business."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.qkv_proj = nn.Linear(hidden, (heads + 2 * kv_heads) * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attention: Attention) -> Tensor:
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)  # [T, H + 2K, E]
        rotated = rotate(qkv[:, : self.heads + self.kv_heads], cos, sin)
        query, key = rotated.split((self.heads, self.kv_heads), dim=1)
        value = qkv[:, self.heads + self.kv_heads :]
        return self.out_proj(attention.attend(layer, query, key, value).flatten(1))


class GatedMLP(nn.Module):
    """SwiGLU with gate and up projections in one matrix."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [T, D]
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, hidden: int, intermediate: int, heads: int, kv_heads: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden, eps)
        self.attention = SelfAttention(hidden, heads, kv_heads, bias)
        self.mlp_norm = RMSNorm(hidden, eps)
        self.mlp = GatedMLP(hidden, intermediate)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attention: Attention) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, layer, attention)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Embedding, blocks, final norm and head: all of LLaDA and of Dream but what tells them apart.

    Args:
        qkv_bias: whether the query, key and value projections have one.
    """

    def __init__(self, config: ModelConfig, qkv_bias: bool) -> None:
        super().__init__()
        self.config = config
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
        x = self.embedding(token_ids)
        cos, sin = rotary_table(positions, self.config.head_dim, self.config.rope_theta)
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin, layer, attention)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of chosen rows of the hidden states [N, D], V embedding rows.

        Which position a row predicts is `ModelConfig.logits_shift`'s to say.
        """
        return self.lm_head(hidden)
