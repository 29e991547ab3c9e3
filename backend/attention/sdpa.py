"""Paged attention on torch's scaled_dot_product_attention: any device, one call per sequence.

Each sequence is attended on its own, so that its result is the same in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from backend.attention.kv_cache import KVCache


@dataclass(frozen=True)
class SequenceSpan:
    """One sequence of a packed batch: its query rows and where its KV lies.

    Attributes:
        context: slots of all its positions, or None when the query covers them all (a prefill).
    """

    query_start: int
    query_end: int
    context: Tensor | slice | None


class SdpaAttention:
    """See `base.Attention`.

    Args:
        slots: where each packed token's KV is written, int64 [T].
        on_layer: called with a layer's index when the KV of all packed tokens is written there.
    """

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
            if span.context is None:
                k, v = key[rows], value[rows]
            else:
                k, v = keys[span.context], values[span.context]
            attended = scaled_dot_product_attention(
                query[rows].transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                enable_gqa=grouped,
            )
            out[rows] = attended[0].transpose(0, 1)
        return out
