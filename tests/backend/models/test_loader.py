from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from backend.models.config import CheckpointError, ModelConfig, load_config
from backend.models.llada import official_names
from backend.models.loader import load_model

CONFIG = {
    "architectures": ["LLaDAModelLM"], "d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2,
    "mlp_hidden_size": 24, "vocab_size": 40, "embedding_size": 48, "max_sequence_length": 128,
    "mask_token_id": 38, "eos_token_id": 39, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
}  # fmt: skip
# GSAI-ML/LLaDA-8B-Instruct's own config.json, without the keys that only its training code reads.
LLADA_8B = {
    "activation_type": "silu", "alibi": False, "architectures": ["LLaDAModelLM"], "attention_layer_norm": False,
    "bias_for_layer_norm": False, "block_type": "llama", "d_model": 4096, "embedding_size": 126464,
    "eos_token_id": 126081, "include_bias": False, "include_qkv_bias": False, "input_emb_norm": False,
    "layer_norm_type": "rms", "mask_token_id": 126336, "max_sequence_length": 4096, "mlp_hidden_size": 12288,
    "mlp_ratio": 4, "model_type": "llada", "multi_query_attention": None, "n_heads": 32, "n_kv_heads": 32,
    "n_layers": 32, "pad_token_id": 126081, "rms_norm_eps": 1e-05, "rope": True, "rope_theta": 500000.0,
    "scale_logits": False, "vocab_size": 126464, "weight_tying": False,
}  # fmt: skip


def tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Random tensors under the official names and shapes."""
    generator = torch.Generator().manual_seed(0)
    kv = config.num_kv_heads * config.head_dim
    hidden, mlp = config.hidden_size, config.intermediate_size
    shapes = {
        "wte": (config.embedding_size, hidden), "q_proj": (hidden, hidden), "k_proj": (kv, hidden),
        "v_proj": (kv, hidden), "attn_out": (hidden, hidden), "ff_proj": (mlp, hidden), "up_proj": (mlp, hidden),
        "attn_norm": (hidden,), "ff_norm": (hidden,), "ln_f": (hidden,),
    }  # fmt: skip
    made = {}
    for name in (n for names in official_names(config).values() for n in names):
        kind = name.split(".")[-2]
        shape = shapes.get(kind) or ((hidden, mlp) if "blocks" in name else (config.embedding_size, hidden))
        made[name] = torch.randn(shape, generator=generator)
    return made


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    def write(shards: int = 1, change: Callable[[dict[str, torch.Tensor]], object] = len, **keys: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **keys}))
        made = tensors(load_config(tmp_path))
        change(made)
        if shards == 1:
            save_file(made, tmp_path / "model.safetensors")
            return tmp_path
        names = list(made)
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            save_file({name: made[name] for name in names[i::shards]}, tmp_path / file)
            weight_map |= dict.fromkeys(names[i::shards], file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return tmp_path

    return write


def load(directory: Path) -> dict[str, torch.Tensor]:
    return load_model(directory, torch.float32, torch.device("cpu")).state_dict()


def test_one_file_and_shards_give_the_same_model(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint()
    whole = load(directory)
    (directory / "model.safetensors").unlink()
    sharded = load(checkpoint(shards=3))
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)
    made = tensors(load_config(directory))
    root = "model.transformer.blocks.1"
    fused = torch.cat([made[f"{root}.{p}_proj.weight"] for p in "qkv"])
    assert torch.equal(whole["blocks.1.attention.qkv_proj.weight"], fused)


def test_tied_embeddings_need_no_head(checkpoint: Callable[..., Path]) -> None:
    state = load(checkpoint(weight_tying=True))
    assert torch.equal(state["lm_head.weight"], state["embedding.weight"])


def test_models_loaded_at_once_have_each_its_own_dtype(checkpoint: Callable[..., Path]) -> None:
    """The default dtype, which torch has one of for all threads, is nobody's but the caller's."""
    directory, dtypes = checkpoint(n_layers=6), (torch.float32, torch.bfloat16, torch.float16)

    def dtypes_of(dtype: torch.dtype) -> set[torch.dtype]:
        models = [load_model(directory, dtype, torch.device("cpu")) for _ in range(20)]
        return {parameter.dtype for model in models for parameter in model.parameters()}

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(dtypes_of, dtypes)) == [{dtype} for dtype in dtypes]
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrower_checkpoint_is_widened(checkpoint: Callable[..., Path], dtype: torch.dtype) -> None:
    state = load(checkpoint(change=lambda made: made.update({name: of.to(dtype) for name, of in made.items()})))
    narrow = tensors(load_config(checkpoint()))["model.transformer.wte.weight"].to(dtype)
    assert {of.dtype for of in state.values()} == {torch.float32}
    assert torch.equal(state["embedding.weight"], narrow.float())


@pytest.mark.parametrize("index", [b"[1]", b'{"weight_map": {"a": 3}}', b'{"weight_map": {"a": ["b"]}}', b"\xff"])
def test_a_broken_index_is_named(checkpoint: Callable[..., Path], index: bytes) -> None:
    directory = checkpoint(shards=2)
    (directory / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(CheckpointError, match=r"index\.json is broken"):
        load(directory)


NAME = "model.transformer.blocks.0.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), f"{NAME!r} is missing"),
        (lambda t: t.update({"model.extra": torch.ones(1)}), "'model.extra' is not part of the model"),
        (lambda t: t.update({NAME: torch.ones(3, 16)}), rf"{NAME!r} has shape \[3, 16\], the model expects \[8, 16\]"),
        (lambda t: t.update({NAME: torch.ones(8, 16, dtype=torch.int32)}), f"{NAME!r} has dtype"),
    ],
)
def test_wrong_tensors_are_named(
    checkpoint: Callable[..., Path], change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint(change=change))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["GPT2"]}, "'GPT2' is not supported"),
        ({"alibi": True}, "alibi=True is not supported"),
        ({"n_heads": 3}, "do not divide"),
        ({"mask_token_id": 40}, "mask_token_id=40 is outside the vocabulary of 40"),
    ],
)
def test_other_models_are_refused(checkpoint: Callable[..., Path], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        checkpoint(**keys)


def test_broken_directories_are_explained(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no config.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="has to be an object"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "d_model"}))
    with pytest.raises(CheckpointError, match="'d_model' is missing"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match="weights are missing"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(CheckpointError, match="broken"):
        load(tmp_path)


def test_the_published_llada_configuration_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLADA_8B))
    config = load_config(tmp_path)
    assert (config.hidden_size, config.num_layers, config.head_dim, config.num_kv_heads) == (4096, 32, 128, 32)
    assert (config.mask_token_id, config.eos_token_ids, config.max_position) == (126336, (126081,), 4096)
    names = [name for group in official_names(config).values() for name in group]
    assert len(names) == len(set(names)) == 32 * 9 + 3
