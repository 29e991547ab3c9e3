"""The demonstration models' shape, and their checkpoints in Hugging Face layout with the architectures' own names."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from backend.models.config import ModelConfig
from backend.models.layers import Transformer
from backend.models.loader import checkpoint_tensors
from benchmarks.demo_model.tokenizer import WordTokenizer

ARCHITECTURES = ("llada", "dream")
CONTEXT_LENGTH = 2048


def demo_config(tokenizer: WordTokenizer, architecture: str) -> ModelConfig:
    """A LLaDA of 0.94 million parameters, or a Dream of 0.88 with half the KV heads."""
    is_dream = architecture == "dream"
    return ModelConfig(
        architecture=architecture,
        vocab_size=tokenizer.vocab_size,
        embedding_size=tokenizer.vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2 if is_dream else 4,
        max_position=CONTEXT_LENGTH,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        mask_token_id=tokenizer.mask,
        eos_token_ids=(tokenizer.end,),
        tie_embeddings=True,
        logits_shift=1 if is_dream else 0,
    )


@torch.no_grad()
def take_weights(model: Transformer, source: Transformer) -> None:
    """Copies the weights of `source`, whose shape differs in the number of KV heads and in biases at most.

    A KV head becomes the mean of those it replaces (Ainslie et al., 2023); biases it lacks stay as they are.
    """
    state = source.state_dict()
    old, new = source.config, model.config
    for name in [name for name in state if "qkv_proj" in name]:
        query, *pair = state[name].split([old.hidden_size, *[old.num_kv_heads * old.head_dim] * 2])
        grouped = [part.unflatten(0, (new.num_kv_heads, -1, new.head_dim)).mean(1).flatten(0, 1) for part in pair]
        state[name] = torch.cat((query, *grouped))
    model.load_state_dict(model.state_dict() | state)


def save_checkpoint(model: Transformer, tokenizer: WordTokenizer, directory: Path) -> None:
    """Writes the configuration, model.safetensors and the tokenizer's files."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(directory, CONTEXT_LENGTH)
    tensors = {name: tensor.detach().clone() for name, tensor in checkpoint_tensors(model).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    special: dict[str, object] = {
        "mask_token_id": config.mask_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "pad_token_id": config.eos_token_ids[0],
    }
    if config.architecture == "dream":
        _write(_dream_keys(config) | special, directory / "config.json")
        _write({"temperature": 0.0, **special}, directory / "generation_config.json")
    else:
        _write(_llada_keys(config) | special, directory / "config.json")


def _write(raw: dict[str, object], path: Path) -> None:
    path.write_text(json.dumps(raw, indent=2) + "\n")


def _llada_keys(config: ModelConfig) -> dict[str, object]:
    return {
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
        "torch_dtype": "float32",
    }


def _dream_keys(config: ModelConfig) -> dict[str, object]:
    return {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "use_mrope": False,
        "use_sliding_window": False,
        "torch_dtype": "float32",
    }
