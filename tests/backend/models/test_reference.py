"""The forwards against the official LLaDA and Dream code, and the cached forwards against Fast-dLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from backend.attention.base import SequenceSpan
from backend.attention.kv_cache import KVCache, PagedSequence
from backend.attention.sdpa import SdpaAttention
from backend.models.kernels import rotary_table, rotate
from backend.models.layers import Transformer
from backend.models.loader import load_model

ATOL = 1e-3  # float32 itself differs from float64 by up to 4e-4 here


class Runner:
    """Forwards over one paged cache, the pages given in the order a test wants them."""

    def __init__(self, model: Transformer, num_pages: int, page_size: int = 16) -> None:
        config = model.config
        self.model = model
        self.cache = KVCache(
            config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim,
            torch.float32, torch.device("cpu"),
        )  # fmt: skip

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor, start: int, pages: list[int], total: int) -> torch.Tensor:
        kv = PagedSequence(self.cache, pages, total)
        rows = kv.slots[start : start + len(ids)]
        attention = SdpaAttention(self.cache, torch.from_numpy(rows), [SequenceSpan(0, len(ids), kv)])
        positions = torch.arange(start, start + len(ids))
        return self.model.logits(self.model(ids, positions, attention))


@pytest.fixture(scope="module", params=["llada", "dream"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(golden: Path, name: str) -> Transformer:
    return load_model(golden / "models" / f"tiny-{name}", torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def tensors(golden: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(golden / "dev" / f"forward_{name}.safetensors")


@pytest.fixture(scope="module")
def cached(golden: Path, name: str) -> list[dict[str, Any]]:
    """The passes with a cache, as the reference's notes describe them."""
    described: list[dict[str, Any]] = json.loads((golden / "dev" / f"forward_{name}.json").read_text())["cached"]
    assert len(described) == 6
    return described


def cases(tensors: dict[str, torch.Tensor], kind: str) -> list[str]:
    return sorted({name.split(".")[0] for name in tensors if name.startswith(kind)})


def test_whole_forwards_equal_the_reference(model: Transformer, tensors: dict[str, torch.Tensor]) -> None:
    forwards = cases(tensors, "fw")
    assert len(forwards) == 8
    for forward in forwards:
        ids = tensors[f"{forward}.input_ids"]
        logits = Runner(model, 16)(ids, 0, list(range(-(-len(ids) // 16))), len(ids))
        torch.testing.assert_close(logits, tensors[f"{forward}.logits"], atol=ATOL, rtol=0)


@pytest.mark.parametrize("scattered", [False, True])
def test_cached_forwards_equal_the_reference(
    model: Transformer, cached: list[dict[str, Any]], tensors: dict[str, torch.Tensor], scattered: bool
) -> None:
    for case in cached:
        name, total, start = case["id"], case["total_length"], case["query_start"]
        run = Runner(model, 16, page_size=16)
        pages = list(range(-(-total // 16)))
        if scattered:
            pages = list(np.random.default_rng(0).permutation(16)[: len(pages)])
        full = run(tensors[f"{name}.x_full"], 0, pages, total)
        torch.testing.assert_close(full, tensors[f"{name}.logits_full"], atol=ATOL, rtol=0)
        for call in "12":
            logits = run(tensors[f"{name}.in{call}"], start, pages, total)
            torch.testing.assert_close(logits, tensors[f"{name}.logits{call}"], atol=ATOL, rtol=0)


def test_the_cache_holds_the_reference_keys_and_values(
    model: Transformer, cached: list[dict[str, Any]], tensors: dict[str, torch.Tensor]
) -> None:
    """Of each KV head, which in Dream several query heads share; the reference keeps its keys unrotated."""
    described = [case for case in cached if case["has_kv"]]
    assert described
    for case in described:
        total, pages = case["total_length"], [5, 2, 9, 0, 7, 1, 11, 3, 4][: -(-case["total_length"] // 16)]
        run = Runner(model, 16)
        run(tensors[f"{case['id']}.x_full"], 0, pages, total)
        slots = torch.from_numpy(run.cache.slots(pages, total))
        cos, sin = rotary_table(torch.arange(total), model.config.head_dim, model.config.rope_theta)
        for layer in range(model.config.num_layers):
            keys, values = (tensors[f"{case['id']}.{kind}{layer}"].transpose(0, 1) for kind in "kv")
            assert values.shape[1] == model.config.num_kv_heads
            torch.testing.assert_close(run.cache.values[layer][slots], values, atol=ATOL, rtol=0)
            torch.testing.assert_close(run.cache.keys[layer][slots], rotate(keys, cos, sin), atol=ATOL, rtol=0)


def test_bfloat16_stays_near_float32(golden: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    half = load_model(golden / "models" / f"tiny-{name}", torch.bfloat16, torch.device("cpu"))
    ids = tensors["fw7.input_ids"]
    run = Runner(half, 16)
    run.cache = KVCache(3, 16, 16, half.config.num_kv_heads, 16, torch.bfloat16, torch.device("cpu"))
    logits = run(ids, 0, list(range(10)), len(ids)).float()
    reference = tensors["fw7.logits"]
    assert logits.isfinite().all()
    # The tiny model's weights are random and large, so bfloat16 shows; a wrong forward has no correlation.
    correlation = torch.corrcoef(torch.stack((logits.flatten(), reference.flatten())))[0, 1]
    assert correlation > 0.99
