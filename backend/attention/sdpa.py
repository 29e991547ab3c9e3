"""Paged attention on torch's scaled_dot_product_attention: any device, one call per sequence.

Each sequence is attended on its own, so that its result is the same in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from backend.attention.base import SequenceSpan
from backend.attention.kv_cache import KVCache
from backend.attention.sdpa_graph import SdpaGraphAttention


class SdpaBackend:
    """See `base.AttentionBackend`."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def begin(
        self, slots: Tensor, spans: Sequence[SequenceSpan], on_layer: Callable[[int], None] | None = None
    ) -> SdpaAttention:
        return SdpaAttention(self.cache, slots, spans, on_layer)

    def graph_attention(
        self, num_sequences: int, query_length: int, max_sequence_length: int, slots: Tensor
    ) -> SdpaGraphAttention:
        return SdpaGraphAttention(self.cache, num_sequences, query_length, max_sequence_length, slots)


class SdpaAttention:
    """See `base.Attention`; the arguments are those of `base.AttentionBackend.begin`."""

    def __init__(
        self,
        cache: KVCache,
        slots: Tensor,
        spans: Sequence[SequenceSpan],
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        self.cache, self.slots, self.spans, self.on_layer = cache, slots, spans, on_layer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.index_copy_(0, self.slots, key)
        values.index_copy_(0, self.slots, value)
        if self.on_layer is not None:
            self.on_layer(layer)
        out = torch.zeros_like(query)
        grouped = query.shape[1] != key.shape[1]
        for span in self.spans:
            rows = slice(span.query_start, span.query_end)
            if span.is_whole:
                k, v = key[rows], value[rows]
            else:
                context = span.kv.context
                k, v = keys[context], values[context]
            attended = scaled_dot_product_attention(
                query[rows].transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                enable_gqa=grouped,
            )
            out[rows] = attended[0].transpose(0, 1)
        return out
