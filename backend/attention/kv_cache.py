"""The paged KV memory of one worker."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """Keys (rotated) and values of all layers: `data` [layers, 2, pages + 1, page_size, K, E].

    A token's slot is `page * page_size + offset`. The page past the last one is scratch: padding
    tokens of a batch write there and nobody reads it.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.scratch_slot = num_pages * page_size
        shape = (num_layers, 2, num_pages + 1, page_size, num_kv_heads, head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        flat = self.data.flatten(2, 3)
        self.keys = [flat[layer, 0] for layer in range(num_layers)]
        """Per layer [slots, K, E]."""
        self.values = [flat[layer, 1] for layer in range(num_layers)]

    def slots(self, pages: Sequence[int], num_tokens: int) -> Tensor | slice:
        """The slots of a sequence's first `num_tokens` tokens: a slice where the pages are neighbours."""
        first = pages[0]
        if pages[-1] - first == len(pages) - 1 and all(b - a == 1 for a, b in zip(pages, pages[1:], strict=False)):
            return slice(first * self.page_size, first * self.page_size + num_tokens)
        starts = torch.tensor(pages, device=self.data.device) * self.page_size
        offsets = torch.arange(self.page_size, device=self.data.device)
        return (starts[:, None] + offsets).flatten()[:num_tokens]
