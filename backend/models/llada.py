"""LLaDA (GSAI-ML/LLaDA-8B-Base, -Instruct, LLaDA-1.5): a Llama block with bidirectional attention.

Equal to the official `modeling_llada.py` for the settings that `config.py` accepts. Shapes: T packed
tokens, D hidden size, V embedding rows.
"""

from __future__ import annotations

from torch import Tensor, nn

from backend.attention.base import Attention
from backend.models.config import ModelConfig
from backend.models.layers import Block, RMSNorm, rotary_table


class Llada(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
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
                bias=False,
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
        """Logits [N, V] of chosen rows of the hidden states [N, D]."""
        return self.lm_head(hidden)


def official_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Our parameter -> the checkpoint tensors that, stacked along the rows, make it."""
    root = "model.transformer"
    names: dict[str, tuple[str, ...]] = {
        "embedding.weight": (f"{root}.wte.weight",),
        "norm.weight": (f"{root}.ln_f.weight",),
    }
    if not config.tie_embeddings:
        names["lm_head.weight"] = (f"{root}.ff_out.weight",)
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"{root}.blocks.{i}"
        names |= {
            f"{ours}.attention_norm.weight": (f"{theirs}.attn_norm.weight",),
            f"{ours}.attention.qkv_proj.weight": tuple(f"{theirs}.{p}_proj.weight" for p in "qkv"),
            f"{ours}.attention.out_proj.weight": (f"{theirs}.attn_out.weight",),
            f"{ours}.mlp_norm.weight": (f"{theirs}.ff_norm.weight",),
            f"{ours}.mlp.gate_up_proj.weight": (f"{theirs}.ff_proj.weight", f"{theirs}.up_proj.weight"),
            f"{ours}.mlp.down_proj.weight": (f"{theirs}.ff_out.weight",),
        }
    return names
