"""Dream's checkpoints: their names, their settings, and what they say of a request's defaults."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from backend.models.config import CheckpointError, load_config
from backend.models.dream import Dream, official_names
from backend.models.loader import load_model

CONFIG = {
    "architectures": ["DreamModel"], "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 40, "max_position_embeddings": 128,
    "mask_token_id": 38, "eos_token_id": 39, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip
# The configuration of Dream-org/Dream-v0-Instruct-7B, without the keys that only its training code reads.
DREAM_7B = {
    "architectures": ["DreamModel"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944, "mask_token_id": 151666,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "Dream", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "pad_token_id": 151643, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    "use_mrope": False, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
LAYER = {
    "input_layernorm.weight": (16,), "post_attention_layernorm.weight": (16,),
    "self_attn.q_proj.weight": (16, 16), "self_attn.q_proj.bias": (16,),
    "self_attn.k_proj.weight": (8, 16), "self_attn.k_proj.bias": (8,),
    "self_attn.v_proj.weight": (8, 16), "self_attn.v_proj.bias": (8,),
    "self_attn.o_proj.weight": (16, 16),
    "mlp.gate_proj.weight": (24, 16), "mlp.up_proj.weight": (24, 16), "mlp.down_proj.weight": (16, 24),
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (40, 16),
    "model.norm.weight": (16,),
    "lm_head.weight": (40, 16),
    **{f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()},
}

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    def write(change: Callable[[Tensors], object] = len, **keys: Any) -> Path:
        generator = torch.Generator().manual_seed(0)
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **keys}))
        return tmp_path

    return write


def load(directory: Path) -> Tensors:
    model = load_model(directory, torch.float32, torch.device("cpu"))
    assert isinstance(model, Dream)
    return model.state_dict()


def test_projections_and_their_biases_are_stacked(checkpoint: Callable[..., Path]) -> None:
    kept: Tensors = {}
    state = load(checkpoint(kept.update))
    for kind in ("weight", "bias"):
        parts = [kept[f"model.layers.1.self_attn.{p}_proj.{kind}"] for p in "qkv"]
        assert torch.equal(state[f"blocks.1.attention.qkv_proj.{kind}"], torch.cat(parts))


def test_tied_embeddings_need_no_head(checkpoint: Callable[..., Path]) -> None:
    state = load(checkpoint(lambda t: t.pop("lm_head.weight"), tie_word_embeddings=True))
    assert torch.equal(state["lm_head.weight"], state["embedding.weight"])


NAME = "model.layers.1.self_attn.k_proj.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), f"{NAME!r} is missing"),
        (lambda t: t.update({"model.layers.2.norm": torch.ones(1)}), "'model.layers.2.norm' is not part of the model"),
        (lambda t: t.update({NAME: torch.ones(16)}), rf"{NAME!r} has shape \[16\], the model expects \[8\]"),
        (lambda t: t.pop("lm_head.weight"), "'lm_head.weight' is missing"),
    ],
)
def test_wrong_tensors_are_named(
    checkpoint: Callable[..., Path], change: Callable[[Tensors], object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint(change))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window=True is not supported"),
        ({"use_mrope": True}, "use_mrope=True is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling=.*yarn.* is not supported; only None is"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; only 'silu' is"),
        ({"attention_bias": False}, "attention_bias=False is not supported"),
        ({"num_attention_heads": 3}, "num_attention_heads=3, num_key_value_heads=2 do not divide"),
        ({"mask_token_id": 40}, "mask_token_id=40 is outside the vocabulary of 40"),
        # Dream-Reasoner: the same names, but its rows predict their own positions.
        ({"architectures": ["DreamForCausalLM"]}, "'DreamForCausalLM' is not supported; supported: .*DreamModel"),
    ],
)
def test_other_settings_are_refused(checkpoint: Callable[..., Path], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint(**keys))


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps", "mask_token_id", "num_attention_heads"])
def test_a_missing_setting_is_not_guessed(checkpoint: Callable[..., Path], key: str) -> None:
    directory = checkpoint()
    (directory / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != key}))
    with pytest.raises(CheckpointError, match=f"key {key!r} is missing"):
        load(directory)


def test_a_window_that_is_not_used_has_no_effect(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint()
    without = load_config(directory)
    assert load_config(checkpoint(use_sliding_window=False, sliding_window=131072)) == without


def test_the_published_dream_configuration_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DREAM_7B))
    config = load_config(tmp_path)
    assert (config.hidden_size, config.num_layers, config.head_dim, config.num_kv_heads) == (3584, 28, 128, 4)
    assert (config.mask_token_id, config.eos_token_ids, config.max_position) == (151666, (151643,), 131072)
    assert (config.logits_shift, config.defaults, config.tie_embeddings) == (1, {}, False)
    names = [name for group in official_names(config).values() for name in group]
    assert len(names) == len(set(names)) == 28 * 12 + 3


def test_a_tiny_reference_checkpoint_has_just_these_names(golden: Path) -> None:
    model = load_model(golden / "models" / "tiny-dream", torch.float32, torch.device("cpu"))
    assert isinstance(model, Dream) and model.config.eos_token_ids == (251,)


def test_what_ends_an_answer_is_gathered_from_all_files(tmp_path: Path) -> None:
    """As in DiffuCoder, whose answers are followed by a padding token that only its tokenizer names."""
    (tmp_path / "config.json").write_text(json.dumps({**DREAM_7B, "eos_token_id": [151643]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643], "temperature": 0.2}))
    added = {"151643": {"content": "<|endoftext|>"}, "151667": {"content": "<|dlm_pad|>"}}
    tokenizer = {"pad_token": "<|dlm_pad|>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    config = load_config(tmp_path)
    assert config.eos_token_ids == (151643, 151645, 151667)
    assert config.defaults == {"temperature": 0.2}


def test_the_mask_never_ends_an_answer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DREAM_7B))
    tokenizer = {"pad_token": "<|mask|>", "added_tokens_decoder": {"151666": {"content": "<|mask|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert load_config(tmp_path).eos_token_ids == (151643,)


def defaults(tmp_path: Path, **generation: object) -> Mapping[str, object]:
    (tmp_path / "config.json").write_text(json.dumps(DREAM_7B))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return load_config(tmp_path).defaults


def test_what_a_request_gets_that_asks_for_nothing_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    assert defaults(tmp_path, alg="entropy", top_p=0.95, top_k=None, steps=512) == {
        "unmasking": "entropy", "quota_schedule": "timesteps", "top_p": 0.95,
    }  # fmt: skip
    assert defaults(tmp_path, alg="origin", temperature=0.0) == {}
    ours = {"block_length": 16, "steps_per_block": 4, "unmasking": "quota", "cache_policy": "prefix"}
    assert defaults(tmp_path, **ours) == ours
    assert defaults(tmp_path, do_sample=False, temperature=0.6, block_length=16) == {"block_length": 16}


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": 3},
        {"temperature": "warm"},
        {"unmasking": "all"},
        {"top_p": 2},
        {"eos_token_id": "x"},
        {"eos_token_id": [5, 152064]},
    ],
)
def test_a_default_that_no_request_could_name_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=f"generation_config.json: {next(iter(wrong))}"):
        defaults(tmp_path, **wrong)
