"""FlashInfer's kernels against torch's: over a naive FlashInfer anywhere, the real one on a GPU."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.attention.base import SequenceSpan
from backend.attention.flashinfer import why_unavailable
from backend.attention.kv_cache import KVCache, PagedSequence
from backend.attention.sdpa import SdpaAttention
from backend.models.config import ModelConfig
from backend.models.kernels import FlashInferKernels, Kernels, TorchKernels
from backend.models.loader import new_model

CONFIG = ModelConfig("dream", 96, 96, 256, 512, 3, 4, 2, 64, 1e-6, 10_000.0, 95, (94,))
WIDE = ModelConfig("dream", 96, 96, 512, 1024, 3, 4, 2, 4096, 1e-6, 1_000_000.0, 95, (94,))  # heads of 128


def rmsnorm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    full = input.float()
    return (full * (full.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(input.dtype)


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    residual += input
    input.copy_(rmsnorm(residual, weight, eps))


def silu_and_mul(input: Tensor) -> Tensor:
    gate, up = input.float().chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up).to(input.dtype)


def apply_rope(positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor) -> None:
    assert cos_sin_cache.dtype == torch.float32
    cos, sin = cos_sin_cache[positions].chunk(2, dim=-1)
    for flat in (query, key):
        heads = flat.view(len(flat), -1, head_size)
        first, second = heads.float().chunk(2, dim=-1)
        turned = (first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None])
        heads.copy_(torch.cat(turned, dim=-1))


NAIVE: dict[str, Callable[..., Any]] = {
    "rmsnorm": rmsnorm,
    "fused_add_rmsnorm": fused_add_rmsnorm,
    "silu_and_mul": silu_and_mul,
    "apply_rope_with_cos_sin_cache_inplace": apply_rope,
}


def forward(kernels: Kernels | None, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Hidden states of a whole sequence and of a block of another."""
    torch.manual_seed(0)
    model = new_model(config).to(device, dtype).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.05)
    if kernels is not None:
        model.kernels = kernels
    cache = KVCache(config.num_layers, 8, 16, config.num_kv_heads, config.head_dim, dtype, device)
    one, two = PagedSequence(cache, [3, 1], 20), PagedSequence(cache, [7, 2, 5], 48)
    positions = torch.cat((torch.arange(20), torch.arange(16, 48))).to(device)
    slots = torch.cat((torch.from_numpy(one.slots), torch.from_numpy(two.slots[16:]))).to(device)
    ids = torch.arange(52, device=device)
    with torch.inference_mode():
        return model(ids, positions, SdpaAttention(cache, slots, [SequenceSpan(0, 20, one), SequenceSpan(20, 52, two)]))


def test_a_forward_by_other_kernels_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**NAIVE))
    device = torch.device("cpu")
    expected = forward(None, CONFIG, torch.float32, device)
    found = forward(FlashInferKernels(CONFIG, device), CONFIG, torch.float32, device)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_every_call_fits_the_real_package(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    called = set()

    def checked(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            bound = inspect.signature(getattr(flashinfer, name)).bind(*arguments, **options)
            called.add(name)
            return NAIVE[name](**bound.arguments)  # by the real one's names

        return call

    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**{name: checked(name) for name in NAIVE}))
    device = torch.device("cpu")
    forward(FlashInferKernels(CONFIG, device), CONFIG, torch.float32, device)
    assert called == set(NAIVE)


def cuda_kernels(config: ModelConfig, dtype: torch.dtype) -> Kernels:
    device = torch.device("cuda")
    if reason := why_unavailable(device, dtype, config.head_dim):
        pytest.skip(reason)
    return FlashInferKernels(config, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(600)  # FlashInfer may compile its kernels first
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_each_kernel_on_a_gpu(dtype: torch.dtype) -> None:
    ours, theirs = TorchKernels(WIDE), cuda_kernels(WIDE, dtype)
    generator = torch.Generator("cuda").manual_seed(0)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    def near(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)

    x, residual, weight, gate_up = new(70, 512), new(70, 512), new(512), new(70, 2048)
    near(theirs.rms_norm(x, weight, 1e-6), ours.rms_norm(x, weight, 1e-6))
    expected = ours.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    for found, one in zip(theirs.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6), expected, strict=True):
        near(found, one)
    near(theirs.silu_mul(gate_up), ours.silu_mul(gate_up))
    qkv, positions = new(70, 8, 128), torch.randint(0, 4096, (70,), generator=generator, device="cuda")
    rotated = [kernels.rotate(qkv.clone(), 4, 2, kernels.rotary(positions)) for kernels in (theirs, ours)]
    for found, one in zip(*rotated, strict=True):
        near(found, one)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_forward_on_a_gpu(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    expected = forward(None, WIDE, torch.float32, device)
    errors = [
        (forward(kernels, WIDE, dtype, device).float() - expected).square().mean().sqrt() / expected.std()
        for kernels in (None, cuda_kernels(WIDE, dtype))
    ]
    assert errors[0] < 0.05
    assert errors[1] < 1.5 * errors[0]
