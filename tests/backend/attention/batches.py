"""Batches of sequences in scattered pages, as a step packs them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.attention.base import AttentionBackend, SequenceSpan
from backend.attention.kv_cache import KVCache, PagedSequence

LAYERS = 2


def new_cache(
    num_pages: int = 64,
    page_size: int = 16,
    kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> KVCache:
    """What a cache may hold before it is written: anything finite."""
    cache = KVCache(LAYERS, num_pages, page_size, kv_heads, head_dim, dtype, torch.device(device))
    cache.data.normal_(generator=torch.Generator(device).manual_seed(0))
    return cache


def sequences(cache: KVCache, lengths: list[int], seed: int = 1) -> list[PagedSequence]:
    """Sequences of these lengths, their pages scattered over the whole cache."""
    free = np.random.default_rng(seed).permutation(cache.scratch_page).tolist()
    found = []
    for length in lengths:
        count = -(-length // cache.page_size)
        found.append(PagedSequence(cache, free[:count], length))
        free = free[count:]
    return found


@dataclass
class Step:
    """Packed query rows: token positions of some sequences, then padding."""

    slots: Tensor
    spans: list[SequenceSpan]
    query: Tensor
    key: Tensor
    value: Tensor

    def attend(self, backend: AttentionBackend) -> Tensor:
        """The last layer's output, without the padding."""
        attention = backend.begin(self.slots, self.spans)
        for layer in range(LAYERS):
            out = attention.attend(layer, self.query, self.key, self.value)
        return out[: self.spans[-1].query_end if self.spans else 0]


def step(
    cache: KVCache, queries: list[tuple[PagedSequence, np.ndarray]], heads: int, padding: int = 0, seed: int = 2
) -> Step:
    """A step that queries these positions of these sequences."""
    spans, slots, rows = [], [], 0
    for kv, positions in queries:
        spans.append(SequenceSpan(rows, rows + len(positions), kv))
        slots.append(kv.slots[positions])
        rows += len(positions)
    slots.append(np.full(padding, cache.scratch_slot))
    device, dtype = cache.data.device, cache.data.dtype
    kv_heads, head_dim = cache.data.shape[4:]
    generator = torch.Generator(device).manual_seed(seed)
    # As the model hands them over: views of one matrix.
    qkv = torch.randn((rows + padding, heads + 2 * kv_heads, head_dim), generator=generator, device=device).to(dtype)
    query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
    return Step(torch.from_numpy(np.concatenate(slots)).to(device), spans, query, key, value)


def mixed(cache: KVCache, heads: int, padding: int = 0) -> Step:
    """Two prefills, two blocks (the one's length no multiple of a page), scattered queries, a single one."""
    of = sequences(cache, [97, 40, 128, 71, 130, 16])
    chosen = np.array([3, 4, 50, 51, 52, 129])
    return step(
        cache,
        [
            (of[0], np.arange(97)),
            (of[1], np.arange(40)),
            (of[2], np.arange(64, 96)),
            (of[3], np.arange(39, 71)),
            (of[4], chosen),
            (of[5], np.array([7])),
        ],
        heads,
        padding,
    )
