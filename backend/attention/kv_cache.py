"""The paged KV memory of one worker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
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
        self.scratch_page = num_pages
        self.scratch_slot = num_pages * page_size
        shape = (num_layers, 2, num_pages + 1, page_size, num_kv_heads, head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        flat = self.data.flatten(2, 3)
        self.keys = [flat[layer, 0] for layer in range(num_layers)]
        """Per layer [slots, K, E]."""
        self.values = [flat[layer, 1] for layer in range(num_layers)]
        self.paged = [layer.unbind() for layer in self.data]
        """Per layer keys and values, each [pages + 1, page_size, K, E]."""

    def slots(self, pages: Sequence[int], num_tokens: int) -> NDArray[np.int64]:
        """The slots of a sequence's first `num_tokens` tokens, int64 [num_tokens]."""
        starts = np.array(pages) * self.page_size
        return (starts[:, None] + np.arange(self.page_size)).flatten()[:num_tokens]

    def context(self, slots: NDArray[np.int64]) -> Tensor | slice:
        """How to read `slots` of `keys` and `values`: as a view where they are neighbours."""
        first, last = int(slots[0]), int(slots[-1])
        if last - first == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
            return slice(first, last + 1)
        return torch.from_numpy(slots).to(self.data.device)


class PagedSequence:
    """Where one sequence's KV lies.

    Attributes:
        pages: int32 [P], no more than its length needs.
        length: in tokens.
        slots: int64 [length], where each of its tokens keeps its KV.
    """

    def __init__(self, cache: KVCache, pages: Sequence[int], length: int) -> None:
        num_pages = -(-length // cache.page_size)
        self.pages: NDArray[np.int32] = np.array(pages[:num_pages], dtype=np.int32)
        self.length = length
        self.last_page_length = length - (num_pages - 1) * cache.page_size
        self.slots = cache.slots(pages, length)
        self._cache = cache

    @cached_property
    def context(self) -> Tensor | slice:
        """How to read all its KV (see `KVCache.context`)."""
        return self._cache.context(self.slots)
