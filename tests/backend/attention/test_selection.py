from __future__ import annotations

import logging
import sys
from importlib.machinery import ModuleSpec

import pytest
import torch

from backend.attention import flashinfer
from backend.attention.base import AttentionUnavailableError
from backend.attention.selection import new_backend, select
from tests.backend.attention import naive_flashinfer
from tests.backend.attention.batches import new_cache

CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper with FlashInfer."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(naive_flashinfer, "__spec__", ModuleSpec("flashinfer", None))
    monkeypatch.setitem(sys.modules, "flashinfer", naive_flashinfer)


def test_on_a_cpu() -> None:
    assert select("auto", torch.device("cpu"), torch.float32, 128) == "sdpa"
    assert select("sdpa", torch.device("cpu"), torch.float32, 128) == "sdpa"
    with pytest.raises(AttentionUnavailableError, match="^attention_backend=flashinfer: it needs an NVIDIA GPU"):
        select("flashinfer", torch.device("cpu"), torch.bfloat16, 128)


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert select("auto", CUDA, torch.bfloat16, 128) == "flashinfer"
    assert select("flashinfer", CUDA, torch.float16, 64) == "flashinfer"
    assert select("sdpa", CUDA, torch.bfloat16, 128) == "sdpa"
    assert caplog.messages == ["attention_backend=flashinfer"] * 2


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "is_installed", "reason"),
    [
        (torch.float32, 128, (9, 0), True, "it needs bfloat16 or float16, not float32"),
        (torch.bfloat16, 96, (9, 0), True, "it needs heads of 64, 128, 256, the model's have 96"),
        (torch.bfloat16, 128, (7, 5), True, "the GPU is older than Ampere"),
        (torch.bfloat16, 128, (9, 0), False, "flashinfer-python is not installed"),
    ],
)
def test_where_flashinfer_cannot_run_auto_takes_torch_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    is_installed: bool,
    reason: str,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if not is_installed:
        monkeypatch.setattr(flashinfer.importlib.util, "find_spec", lambda name: None)
    assert select("auto", CUDA, dtype, head_dim) == "sdpa"
    assert caplog.messages[0].startswith(f"attention_backend=sdpa: no FlashInfer, {reason}")
    with pytest.raises(AttentionUnavailableError, match=reason):
        select("flashinfer", CUDA, dtype, head_dim)


@pytest.mark.usefixtures("gpu")
def test_a_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer.importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    reason = flashinfer.why_unavailable(CUDA, torch.bfloat16, 128)
    assert reason is not None and reason.startswith("flashinfer-python cannot be imported: ModuleNotFoundError")


@pytest.mark.usefixtures("gpu")
def test_by_name() -> None:
    cache = new_cache()
    assert [type(new_backend(name, cache, 2)).__name__ for name in ("flashinfer", "sdpa")] == [
        "FlashInferBackend",
        "SdpaBackend",
    ]
