"""The demonstration model's shape, and its checkpoint in Hugging Face layout with LLaDA's own names."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from backend.models.config import ModelConfig
from backend.models.llada import Llada, official_names
from benchmarks.demo_model.tokenizer import WordTokenizer

CONTEXT_LENGTH = 2048


def demo_config(tokenizer: WordTokenizer) -> ModelConfig:
    """0.94 million parameters."""
    return ModelConfig(
        architecture="llada",
        vocab_size=tokenizer.vocab_size,
        embedding_size=tokenizer.vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        max_position=CONTEXT_LENGTH,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        mask_token_id=tokenizer.mask,
        eos_token_ids=(tokenizer.end,),
        tie_embeddings=True,
    )


def save_checkpoint(model: Llada, tokenizer: WordTokenizer, directory: Path) -> None:
    """Writes config.json, model.safetensors and the tokenizer's files."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(directory, CONTEXT_LENGTH)
    config = model.config
    state = model.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    for ours, theirs in official_names(config).items():
        parts = state[ours].chunk(len(theirs))
        tensors |= {name: part.contiguous().clone() for name, part in zip(theirs, parts, strict=True)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    raw = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "block_type": "llama",
        "layer_norm_type": "rms",
        "activation_type": "silu",
        "rope": True,
        "include_bias": False,
        "weight_tying": config.tie_embeddings,
        "d_model": config.hidden_size,
        "n_layers": config.num_layers,
        "n_heads": config.num_heads,
        "n_kv_heads": config.num_kv_heads,
        "mlp_hidden_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "embedding_size": config.embedding_size,
        "max_sequence_length": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "mask_token_id": config.mask_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "pad_token_id": config.eos_token_ids[0],
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
