"""Attention of fixed shapes on torch alone: what a CUDA graph captures where FlashInfer is not to be had.

It reads as many positions as the longest sequence may have, whatever the sequences have: correct
everywhere, the CPU included, and slow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from backend.attention.kv_cache import KVCache, PagedSequence


class SdpaGraphAttention:
    """See `base.GraphAttention`. B sequences, L query tokens of each, P pages of the longest."""

    def __init__(
        self, cache: KVCache, num_sequences: int, query_length: int, max_sequence_length: int, slots: Tensor
    ) -> None:
        self._cache = cache
        self._shape = (num_sequences, query_length)
        self._slots = slots
        max_pages = -(-max_sequence_length // cache.page_size)
        device = cache.data.device
        self._host_pages = np.full((num_sequences, max_pages), cache.scratch_page, dtype=np.int64)
        self._host_lengths = np.full((num_sequences, 1), cache.page_size, dtype=np.int64)
        self._pages = torch.from_numpy(self._host_pages).to(device, copy=True)
        self._positions = torch.arange(max_pages * cache.page_size, device=device)
        self._is_visible = torch.empty((num_sequences, 1, 1, len(self._positions)), dtype=torch.bool, device=device)
        self._show()
        self._planned: list[PagedSequence | None] = [None] * num_sequences

    def plan(self, sequences: Sequence[PagedSequence]) -> bool:
        rows = [*sequences, *[None] * (len(self._planned) - len(sequences))]
        changed = [i for i, row in enumerate(rows) if row is not self._planned[i]]
        for i in changed:
            row = rows[i]
            self._host_pages[i] = self._cache.scratch_page
            self._host_lengths[i] = self._cache.page_size
            if row is not None:
                self._host_pages[i, : len(row.pages)] = row.pages
                self._host_lengths[i] = row.length
        if changed:
            self._planned = rows
            self._pages.copy_(torch.from_numpy(self._host_pages))
            self._show()
        return bool(changed)

    def _show(self) -> None:
        lengths = torch.from_numpy(self._host_lengths).to(self._pages.device)
        self._is_visible[:, 0, 0] = self._positions < lengths

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._cache.keys[layer].index_copy_(0, self._slots, key)
        self._cache.values[layer].index_copy_(0, self._slots, value)
        num_sequences, query_length = self._shape
        heads, kv_heads = query.shape[1], key.shape[1]
        # A group's heads as more queries of its KV head: torch's fast kernels take no mask with grouped heads.
        grouped = query.view(num_sequences, query_length, kv_heads, heads // kv_heads, -1)
        q = grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, K, H / K * L, E]
        k, v = (self._read(paged) for paged in self._cache.paged[layer])  # [B, K, S, E]
        out = scaled_dot_product_attention(q, k, v, attn_mask=self._is_visible)
        return out.unflatten(2, (-1, query_length)).permute(0, 3, 1, 2, 4).reshape(query.shape)

    def _read(self, paged: Tensor) -> Tensor:
        read = paged[self._pages].flatten(1, 2).transpose(1, 2)
        # Not only masked: what a failed request left in a page may be NaN, which no weight of 0 makes 0.
        return read.masked_fill(~self._is_visible.transpose(2, 3), 0)
