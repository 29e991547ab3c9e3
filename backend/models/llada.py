"""LLaDA (GSAI-ML/LLaDA-8B-Base, -Instruct, LLaDA-1.5): a Llama block with bidirectional attention.

Equal to the official `modeling_llada.py` for the settings that `config.py` accepts. The prediction for a
position is that position's own row.
"""

from __future__ import annotations

from backend.models.config import ModelConfig
from backend.models.layers import Transformer


class Llada(Transformer):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, qkv_bias=False)


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
