"""What a checkpoint's own files say about its model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """The checkpoint directory cannot be served; the message names the file, key or tensor."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one masked diffusion model and the token ids that have a meaning to it."""

    architecture: str
    vocab_size: int
    embedding_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    tie_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


# Options of the official LLaDA code that change the forward and that no published LLaDA checkpoint sets.
_LLADA_FIXED = {
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_type": "llama",
    "activation_type": "silu",
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "rope": True,
    "scale_logits": False,
}


def load_config(directory: Path) -> ModelConfig:
    """Reads `config.json` of a Hugging Face checkpoint directory.

    Raises:
        CheckpointError: a missing file or key, an unknown architecture, or an unsupported setting.
    """
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is no checkpoint directory: it has no config.json") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    architectures = raw.get("architectures") or ["(none)"]
    if architectures[0] != "LLaDAModelLM":
        raise CheckpointError(f"{path}: architecture {architectures[0]!r} is not supported; supported: LLaDAModelLM")
    try:
        return _llada_config(raw)
    except KeyError as error:
        raise CheckpointError(f"{path}: key {error.args[0]!r} is missing") from None


def _llada_config(raw: dict[str, Any]) -> ModelConfig:
    for key, supported in _LLADA_FIXED.items():
        if raw.get(key, supported) != supported:
            raise CheckpointError(f"config.json: {key}={raw[key]!r} is not supported; only {supported!r} is")
    heads = raw["n_heads"]
    kv_heads = raw.get("n_kv_heads") or (1 if raw.get("multi_query_attention") else heads)
    if raw["d_model"] % heads or heads % kv_heads:
        raise CheckpointError(
            f"config.json: d_model={raw['d_model']}, n_heads={heads}, n_kv_heads={kv_heads} do not divide"
        )
    eos = raw["eos_token_id"]
    return ModelConfig(
        architecture="llada",
        vocab_size=raw["vocab_size"],
        embedding_size=raw.get("embedding_size") or raw["vocab_size"],
        hidden_size=raw["d_model"],
        intermediate_size=raw.get("mlp_hidden_size") or raw["mlp_ratio"] * raw["d_model"],
        num_layers=raw["n_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        max_position=raw["max_sequence_length"],
        rms_norm_eps=raw.get("rms_norm_eps", 1e-5),
        rope_theta=raw.get("rope_theta", 10000.0),
        mask_token_id=raw["mask_token_id"],
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        tie_embeddings=raw.get("weight_tying", False),
    )
