"""Dream checkpoints through real graphs: a random one's answers are the engine's own, the trained one's right, too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from components.config import DEMO_MODELS
from tests.e2e.conftest import HYBRID, TWO_WORKERS, _OneAtATime
from tests.e2e.reference import MODEL, Reference
from tests.e2e.served import Served
from tests.e2e.test_answers import ask_tasks
from tests.e2e.test_hybrid import ask_all

pytestmark = pytest.mark.e2e

WIDTH, HEADS, KV_HEADS, INNER, LAYERS = 128, 4, 2, 384, 3


def write_dream_model(directory: Path) -> None:
    """Large random weights, as in `write_chaotic_model`, under Dream's names and with its grouped queries."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / file, directory / file)
    demo = json.loads((MODEL / "config.json").read_text())
    config = {
        "architectures": ["DreamModel"], "model_type": "Dream", "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": INNER,
        "vocab_size": demo["vocab_size"], "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "mask_token_id": demo["mask_token_id"], "eos_token_id": demo["eos_token_id"], "tie_word_embeddings": False,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain * columns**-0.5

    tensors = {"model.norm.weight": torch.ones(WIDTH)}
    for layer in (f"model.layers.{i}" for i in range(LAYERS)):
        tensors |= {f"{layer}.{name}_layernorm.weight": torch.ones(WIDTH) for name in ("input", "post_attention")}
        for name in "qkv":
            rows = WIDTH if name == "q" else WIDTH * KV_HEADS // HEADS
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = matrix(rows, WIDTH, 3.0)
            tensors[f"{layer}.self_attn.{name}_proj.bias"] = torch.randn(rows, generator=generator)
        tensors[f"{layer}.self_attn.o_proj.weight"] = matrix(WIDTH, WIDTH, 3.0)
        tensors |= {f"{layer}.mlp.{name}_proj.weight": matrix(INNER, WIDTH, 3.0) for name in ("gate", "up")}
        tensors[f"{layer}.mlp.down_proj.weight"] = matrix(WIDTH, INNER, 3.0)
    tensors["model.embed_tokens.weight"] = matrix(demo["vocab_size"], WIDTH, 10.0)
    head = tensors["lm_head.weight"] = matrix(demo["vocab_size"], WIDTH, 1.0)
    for token, index in Tokenizer.from_file(str(MODEL / "tokenizer.json")).get_vocab().items():
        if token.startswith("<"):  # special tokens and single bytes
            head[index] *= 0.02
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def dream_model(tmp_path: Path) -> Path:
    write_dream_model(tmp_path)
    return tmp_path


@pytest.fixture
def dream_graph(_graphs: _OneAtATime, dream_model: Path) -> Iterator[Served]:
    served = _graphs.get("dream_graph", dream_model, HYBRID)
    served.wait_until_whole(num_workers=3)
    yield served
    served.wait_until_whole(num_workers=3)


def test_dream_by_every_way_through_a_hybrid_graph(dream_graph: Served, dream_model: Path) -> None:
    ask_all(dream_graph, Reference(dream_model), 60)


@pytest.fixture
def demo_dream_graph(_graphs: _OneAtATime) -> Iterator[Served]:
    """The demonstration model with Dream's architecture, by its name."""
    served = _graphs.get("demo_dream_graph", Path("demo-dream"), TWO_WORKERS)
    served.wait_until_whole(num_workers=2)
    yield served
    served.wait_until_whole(num_workers=2)


def test_most_answers_of_the_trained_dream_are_right(demo_dream_graph: Served) -> None:
    ask_tasks(demo_dream_graph, Reference(DEMO_MODELS["demo-dream"]))
