"""Attention of fixed shapes, as a CUDA graph captures it: torch's and, over a naive FlashInfer, FlashInfer's."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from backend.attention.base import AttentionBackend, GraphAttention
from backend.attention.flashinfer import FlashInferBackend
from backend.attention.flashinfer_graph import FlashInferGraphAttention
from backend.attention.kv_cache import KVCache, PagedSequence
from backend.attention.sdpa import SdpaBackend
from tests.backend.attention import naive_flashinfer
from tests.backend.attention.batches import LAYERS, new_cache, sequences, step

B, L = 4, 8


class Bucket:
    """A graph attention and what a runner keeps beside it."""

    def __init__(self, backend: AttentionBackend, cache: KVCache, heads: int) -> None:
        self.cache, self.heads = cache, heads
        self.slots = torch.full((B * L,), cache.scratch_slot, dtype=torch.int64)
        self.attention: GraphAttention = backend.graph_attention(B, L, 100, self.slots)

    def check(self, rows: list[tuple[PagedSequence, int]], changes: bool = True) -> None:
        """Denoises a block of each sequence, from the position given with it, and compares with eager SDPA."""
        assert self.attention.plan([kv for kv, _ in rows]) is changes
        positions = [(kv, np.arange(start, start + L)) for kv, start in rows]
        batch = step(self.cache, positions, self.heads, (B - len(rows)) * L)
        self.slots.copy_(batch.slots)
        for layer in range(LAYERS):
            out = self.attention.attend(layer, batch.query, batch.key, batch.value)
        assert out.shape == batch.query.shape
        expected = batch.attend(SdpaBackend(self.cache))
        torch.testing.assert_close(out[: len(expected)], expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(params=["sdpa", "flashinfer"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    monkeypatch.setitem(sys.modules, "flashinfer", naive_flashinfer)
    naive_flashinfer.CALLS.clear()
    cache, heads = new_cache(page_size=8), 6
    backend = SdpaBackend(cache) if request.param == "sdpa" else FlashInferBackend(cache, heads)
    return Bucket(backend, cache, heads)


def num_plans() -> int:
    return sum(name == "plan" for name, _, _ in naive_flashinfer.CALLS)


def test_rows_come_change_and_go(bucket: Bucket) -> None:
    one, two, three, four, five = sequences(bucket.cache, [40, 95, 64, 8, 100])
    bucket.check([(one, 32)])
    bucket.check([(one, 32), (two, 10)])
    bucket.check([(one, 24), (two, 10)], changes=False)
    bucket.check([(three, 0), (two, 80), (four, 0), (five, 92)])
    bucket.check([(five, 0), (four, 0)])
    bucket.check([])
    bucket.check([], changes=False)


def test_other_pages_of_the_same_size_need_no_plan(bucket: Bucket) -> None:
    one, two, alike, longer = sequences(bucket.cache, [40, 95, 95, 96])
    bucket.check([(one, 0), (two, 0)])
    before = num_plans()
    bucket.check([(one, 0), (alike, 50)])
    assert num_plans() == before
    bucket.check([(one, 0), (longer, 50)])
    assert num_plans() == before + isinstance(bucket.attention, FlashInferGraphAttention)


def test_it_reads_nothing_that_was_not_planned(bucket: Bucket) -> None:
    (one,) = sequences(bucket.cache, [37])
    others = [page for page in range(bucket.cache.scratch_page) if page not in one.pages]
    bucket.cache.data[:, :, others] = torch.nan
    for keys, values in zip(bucket.cache.keys, bucket.cache.values, strict=True):
        keys[one.pages[-1] * 8 + 5 : one.pages[-1] * 8 + 8] = torch.nan
        values[one.pages[-1] * 8 + 5 : one.pages[-1] * 8 + 8] = torch.nan
    bucket.check([(one, 0)])


def test_a_plan_changes_no_addresses(bucket: Bucket) -> None:
    (one,) = sequences(bucket.cache, [40])
    before = [tensor.data_ptr() for tensor in tensors(bucket.attention)]
    bucket.check([(one, 0)])
    assert before and [tensor.data_ptr() for tensor in tensors(bucket.attention)] == before


def tensors(attention: GraphAttention) -> list[torch.Tensor]:
    return [value for value in vars(attention).values() if isinstance(value, torch.Tensor)]
