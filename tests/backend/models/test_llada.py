"""The forward against the official LLaDA code, and the cached forward against Fast-dLLM."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from backend.attention.kv_cache import KVCache
from backend.attention.sdpa import SdpaAttention, SequenceSpan
from backend.models.llada import Llada
from backend.models.loader import load_model

ATOL = 1e-3  # float32 itself differs from float64 by up to 4e-4 here


class Runner:
    """Forwards over one paged cache, the pages given in the order a test wants them."""

    def __init__(self, model: Llada, num_pages: int, page_size: int = 16) -> None:
        config = model.config
        self.model = model
        self.cache = KVCache(
            config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim,
            torch.float32, torch.device("cpu"),
        )  # fmt: skip

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor, start: int, pages: list[int], total: int) -> torch.Tensor:
        slots = self.cache.slots(pages, total)
        rows = slots[start : start + len(ids)]
        context = None if len(ids) == total else self.cache.context(slots)
        attention = SdpaAttention(self.cache, torch.from_numpy(rows), [SequenceSpan(0, len(ids), context)])
        positions = torch.arange(start, start + len(ids))
        return self.model.logits(self.model(ids, positions, attention))


@pytest.fixture(scope="module")
def model(golden: Path) -> Llada:
    return load_model(golden / "models" / "tiny-llada", torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def tensors(golden: Path) -> dict[str, torch.Tensor]:
    return load_file(golden / "dev" / "forward_llada.safetensors")


def cases(tensors: dict[str, torch.Tensor], kind: str) -> list[str]:
    return sorted({name.split(".")[0] for name in tensors if name.startswith(kind)})


def test_whole_forwards_equal_the_reference(model: Llada, tensors: dict[str, torch.Tensor]) -> None:
    names = cases(tensors, "fw")
    assert len(names) == 8
    for name in names:
        ids = tensors[f"{name}.input_ids"]
        logits = Runner(model, 16)(ids, 0, list(range(-(-len(ids) // 16))), len(ids))
        torch.testing.assert_close(logits, tensors[f"{name}.logits"], atol=ATOL, rtol=0)


@pytest.mark.parametrize("scattered", [False, True])
def test_cached_forwards_equal_the_reference(
    model: Llada, golden: Path, tensors: dict[str, torch.Tensor], scattered: bool
) -> None:
    described = json.loads((golden / "dev" / "forward_llada.json").read_text())["cached"]
    assert len(described) == 6
    for case in described:
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


def test_bfloat16_stays_near_float32(golden: Path, model: Llada, tensors: dict[str, torch.Tensor]) -> None:
    half = load_model(golden / "models" / "tiny-llada", torch.bfloat16, torch.device("cpu"))
    ids = tensors["fw7.input_ids"]
    run = Runner(half, 16)
    run.cache = KVCache(3, 16, 16, 4, 16, torch.bfloat16, torch.device("cpu"))
    logits = run(ids, 0, list(range(10)), len(ids)).float()
    reference = tensors["fw7.logits"]
    assert logits.isfinite().all()
    # The tiny model's weights are random and large, so bfloat16 shows; a wrong forward has no correlation.
    correlation = torch.corrcoef(torch.stack((logits.flatten(), reference.flatten())))[0, 1]
    assert correlation > 0.99
