"""The FlashInfer backends over a naive FlashInfer, against SDPA; and their calls against the real one's signatures."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator

import pytest
import torch

from backend.attention.flashinfer import FlashInferBackend, why_unavailable
from backend.attention.sdpa import SdpaBackend
from tests.backend.attention import naive_flashinfer
from tests.backend.attention.batches import mixed, new_cache, sequences

HEADS = {"mha": 2, "gqa": 6}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[object, ...], dict[str, object]]]]:
    monkeypatch.setitem(sys.modules, "flashinfer", naive_flashinfer)
    naive_flashinfer.CALLS.clear()
    yield naive_flashinfer.CALLS
    naive_flashinfer.CALLS.clear()


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("page_size", [16, 8])
@pytest.mark.usefixtures("calls")
def test_a_mixed_step_is_what_sdpa_computes(heads: int, padding: int, page_size: int) -> None:
    caches = [new_cache(page_size=page_size) for _ in range(2)]
    outs = []
    for cache, backend in zip(caches, (SdpaBackend(caches[0]), FlashInferBackend(caches[1], heads)), strict=True):
        outs.append(mixed(cache, heads, padding).attend(backend))
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(caches[0].data[:, :, :-1], caches[1].data[:, :, :-1])


def test_a_step_that_runs_again_is_not_planned_again(calls: list[tuple[str, object, object]]) -> None:
    cache = new_cache()
    backend = FlashInferBackend(cache, 2)
    first, second = mixed(cache, 2), mixed(cache, 2)
    for batch in (first, first, second, first):
        batch.attend(backend)
    assert [name for name, _, _ in calls if name == "plan"] == ["plan"] * 3


def test_layers_are_announced_when_they_are_written() -> None:
    cache = new_cache()
    seen: list[int] = []
    batch = mixed(cache, 2)

    def on_layer(layer: int) -> None:
        slots = batch.slots
        assert torch.equal(cache.keys[layer][slots], batch.key) and torch.equal(cache.values[layer][slots], batch.value)
        seen.append(layer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", naive_flashinfer)
        attention = FlashInferBackend(cache, 2).begin(batch.slots, batch.spans, on_layer)
    for layer in (0, 1):
        attention.attend(layer, batch.query, batch.key, batch.value)
    assert seen == [0, 1]


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_every_call_fits_the_real_package(heads: int, calls: list[tuple[str, tuple[object, ...], dict[str, object]]]):
    sys.modules.pop("flashinfer")
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    sys.modules["flashinfer"] = naive_flashinfer
    cache = new_cache()
    backend = FlashInferBackend(cache, heads)
    mixed(cache, heads).attend(backend)
    graph = backend.graph_attention(3, 8, 64, torch.zeros(24, dtype=torch.int64))
    graph.plan(sequences(cache, [40, 50]))
    assert {name for name, _, _ in calls} == {"__init__", "plan", "run"}
    for name, arguments, options in calls:
        method = getattr(flashinfer.BatchPrefillWithPagedKVCacheWrapper, name)
        inspect.signature(method).bind(None, *arguments, **options)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "reason"),
    [("cpu", torch.bfloat16, 128, "it needs an NVIDIA GPU, the device is cpu")],
)
def test_where_it_cannot_run(device: str, dtype: torch.dtype, head_dim: int, reason: str) -> None:
    assert why_unavailable(torch.device(device), dtype, head_dim) == reason
