"""Dream (Dream-org/Dream-v0-Base-7B, -Instruct-7B, Dream-Coder, apple/DiffuCoder): Qwen2 with bidirectional attention.

Equal to the official `modeling_dream.py` for the settings that `config.py` accepts: grouped-query
attention, a bias on the query, key and value projections. It was made from a model that predicts the
next token and still does: row p predicts position p + 1 (`ModelConfig.logits_shift`).
"""

from __future__ import annotations

from backend.models.config import ModelConfig
from backend.models.layers import Transformer


class Dream(Transformer):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, qkv_bias=True)


def official_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Our parameter -> the checkpoint tensors that, stacked along the rows, make it."""
    names: dict[str, tuple[str, ...]] = {
        "embedding.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
    }
    if not config.tie_embeddings:
        names["lm_head.weight"] = ("lm_head.weight",)
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        names |= {
            f"{ours}.attention_norm.weight": (f"{theirs}.input_layernorm.weight",),
            f"{ours}.attention.qkv_proj.weight": tuple(f"{theirs}.self_attn.{p}_proj.weight" for p in "qkv"),
            f"{ours}.attention.qkv_proj.bias": tuple(f"{theirs}.self_attn.{p}_proj.bias" for p in "qkv"),
            f"{ours}.attention.out_proj.weight": (f"{theirs}.self_attn.o_proj.weight",),
            f"{ours}.mlp_norm.weight": (f"{theirs}.post_attention_layernorm.weight",),
            f"{ours}.mlp.gate_up_proj.weight": tuple(f"{theirs}.mlp.{p}_proj.weight" for p in ("gate", "up")),
            f"{ours}.mlp.down_proj.weight": (f"{theirs}.mlp.down_proj.weight",),
        }
    return names
