"""Models of the published shapes with random weights, made on the device: nothing has to be downloaded."""

from __future__ import annotations

import torch

from backend.models.config import ModelConfig
from backend.models.layers import Transformer
from backend.models.loader import empty_model
from benchmarks.simulator.hardware import Model, models

TOY = {
    "toy-llada": Model(layers=2, width=64, heads=4, kv_heads=4, head_dim=16, ffn_width=160, vocab=512),
    "toy-dream": Model(layers=2, width=64, heads=4, kv_heads=2, head_dim=16, ffn_width=160, vocab=512),
}
"""For a try of all this on a CPU."""
_STD = 0.02


def shapes() -> dict[str, Model]:
    return models() | TOY


def model_config(name: str) -> ModelConfig:
    """The configuration of a published shape or a toy; no token ends an answer by chance."""
    shape = shapes()[name]
    is_dream = "dream" in name
    return ModelConfig(
        architecture="dream" if is_dream else "llada",
        vocab_size=shape.vocab,
        embedding_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.ffn_width,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        max_position=8192,
        rms_norm_eps=1e-6 if is_dream else 1e-5,
        rope_theta=1e6 if is_dream else 5e5,
        mask_token_id=shape.vocab - 2,
        eos_token_ids=(shape.vocab - 1,),
        logits_shift=int(is_dream),
    )


def random_model(name: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Transformer:
    """A model of that shape on `device`; the same seed gives the same weights on the same kind of device."""
    model = empty_model(model_config(name), dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=_STD, generator=generator)
    return model
