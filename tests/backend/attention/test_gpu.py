"""FlashInfer itself against SDPA, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backend.attention.base import AttentionBackend
from backend.attention.flashinfer import FlashInferBackend, why_unavailable
from backend.attention.kv_cache import KVCache, PagedSequence
from backend.attention.sdpa import SdpaBackend
from tests.backend.attention.batches import LAYERS, mixed, new_cache, sequences, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),  # FlashInfer may compile a kernel first
]
L = 32
CASES = [
    pytest.param(torch.bfloat16, 4, 4, id="bfloat16 mha"),
    pytest.param(torch.bfloat16, 28, 4, id="bfloat16 gqa"),
    pytest.param(torch.float16, 28, 4, id="float16 gqa"),
]


def cuda_cache(dtype: torch.dtype, kv_heads: int, page_size: int = 16) -> KVCache:
    return new_cache(128, page_size, kv_heads, 128, dtype, "cuda")


def flashinfer(cache: KVCache, heads: int) -> FlashInferBackend:
    if reason := why_unavailable(cache.data.device, cache.data.dtype, 128):
        pytest.skip(reason)
    return FlashInferBackend(cache, heads)


def near(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.isfinite().all()
    torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("dtype", "heads", "kv_heads"), CASES)
@pytest.mark.parametrize("page_size", [16, 8])
@pytest.mark.parametrize("padding", [0, 3])
@torch.inference_mode()
def test_a_mixed_step_in_scattered_pages(
    dtype: torch.dtype, heads: int, kv_heads: int, page_size: int, padding: int
) -> None:
    caches = [cuda_cache(dtype, kv_heads, page_size) for _ in range(2)]
    expected = mixed(caches[0], heads, padding).attend(SdpaBackend(caches[0]))
    backend = flashinfer(caches[1], heads)
    batch = mixed(caches[1], heads, padding)
    for _ in range(2):  # the second time by the plan of the first
        near(batch.attend(backend), expected)
    assert torch.equal(caches[0].data[:, :, :-1], caches[1].data[:, :, :-1])


@pytest.mark.parametrize(("dtype", "heads", "kv_heads"), CASES)
@pytest.mark.parametrize("kind", ["flashinfer", "sdpa"])
@torch.inference_mode()
def test_a_captured_graph_follows_its_plans(dtype: torch.dtype, heads: int, kv_heads: int, kind: str) -> None:
    cache = cuda_cache(dtype, kv_heads)
    backend: AttentionBackend = flashinfer(cache, heads) if kind == "flashinfer" else SdpaBackend(cache)
    batch_size = 4
    slots = torch.full((batch_size * L,), cache.scratch_slot, dtype=torch.int64, device="cuda")
    attention = backend.graph_attention(batch_size, L, 400, slots)
    query, key, value = (
        torch.zeros(batch_size * L, count, 128, dtype=dtype, device="cuda") for count in (heads, kv_heads, kv_heads)
    )

    def forward() -> list[torch.Tensor]:
        return [attention.attend(layer, query, key, value) for layer in range(LAYERS)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = forward()

    def check(rows: list[tuple[PagedSequence, int]]) -> None:
        attention.plan([kv for kv, _ in rows])
        batch = step(cache, [(kv, np.arange(start, start + L)) for kv, start in rows], heads, (4 - len(rows)) * L)
        slots.copy_(batch.slots)
        for buffer, tensor in ((query, batch.query), (key, batch.key), (value, batch.value)):
            buffer.copy_(tensor)
        graph.replay()
        near(outs[-1][: len(rows) * L], batch.attend(SdpaBackend(cache)))

    one, two, alike, long, short = sequences(cache, [100, 333, 333, 400, 32])
    check([(one, 64)])
    check([(one, 64), (two, 301)])
    check([(one, 32), (alike, 64)])
    check([(long, 368), (short, 0), (one, 0), (two, 0)])
    check([(short, 0)])


@torch.inference_mode()
def test_plans_overtake_a_busy_gpu_without_harm() -> None:
    """The host is many steps ahead: no plan may be overwritten before the GPU has it."""
    cache = cuda_cache(torch.bfloat16, 4)
    backend = flashinfer(cache, 4)
    of = sequences(cache, [200, 64, 350, 90, 48, 500])
    batches = [step(cache, [(kv, np.arange(L)), (of[i - 1], np.arange(16))], 4, seed=i) for i, kv in enumerate(of)]
    expected = [batch.attend(SdpaBackend(cache)) for batch in batches]
    for batch in batches:
        batch.attend(backend)  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    found = [batch.attend(backend) for batch in batches]
    for one, other in zip(found, expected, strict=True):
        near(one, other)
