"""A checkpoint with one matrix for embedding and output, as the demonstration model's."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from backend.models.config import load_config
from backend.models.llada import Llada, official_names
from backend.models.loader import load_model

CONFIG = {
    "architectures": ["LLaDAModelLM"],
    "d_model": 16,
    "n_layers": 1,
    "n_heads": 2,
    "mlp_hidden_size": 24,
    "vocab_size": 40,
    "max_sequence_length": 64,
    "mask_token_id": 1,
    "eos_token_id": 2,
    "weight_tying": True,
}


def test_the_output_matrix_is_the_embedding(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    state = Llada(load_config(tmp_path)).state_dict()
    tensors = {}
    for ours, theirs in official_names(load_config(tmp_path)).items():
        parts = state[ours].chunk(len(theirs))
        tensors |= {name: part.clone() for name, part in zip(theirs, parts, strict=True)}
    save_file(tensors, tmp_path / "model.safetensors")

    model = load_model(tmp_path, torch.float32, torch.device("cpu"))

    assert model.lm_head.weight is model.embedding.weight
    hidden = torch.eye(16)[:3]
    assert torch.equal(model.logits(hidden), tensors["model.transformer.wte.weight"].T[:3])
