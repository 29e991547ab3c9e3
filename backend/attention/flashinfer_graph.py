"""FlashInfer's attention inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from backend.attention.fence import Fence
from backend.attention.kv_cache import KVCache, PagedSequence
from backend.attention.page_table import PageTable


class FlashInferGraphAttention:
    """See `base.GraphAttention`.

    How the kernels share the work depends on how many pages each row has. So only another number makes
    FlashInfer plan anew; other pages are copied over the old ones.

    Args:
        new_wrapper: makes FlashInfer's wrapper for graphs, given its buffers by name.
        shape: see `flashinfer.plan_shape`.
    """

    def __init__(
        self,
        cache: KVCache,
        new_wrapper: Callable[..., Any],
        shape: dict[str, Any],
        num_sequences: int,
        query_length: int,
        max_sequence_length: int,
        slots: Tensor,
    ) -> None:
        self._cache, self._slots, self._shape = cache, slots, shape
        self._query_lengths = [query_length] * num_sequences
        longest = -(-max_sequence_length // cache.page_size)
        max_pages = min(num_sequences * longest, cache.scratch_page + num_sequences)

        def buffer(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=cache.data.device)

        self._pages = buffer(max_pages)
        self._wrapper = new_wrapper(
            qo_indptr_buf=buffer(num_sequences + 1),
            paged_kv_indptr_buf=buffer(num_sequences + 1),
            paged_kv_indices_buf=self._pages,
            paged_kv_last_page_len_buf=buffer(num_sequences),
        )
        self._table = PageTable(num_sequences, max_pages, is_pinned=cache.data.is_cuda)
        self._padding = PagedSequence(cache, [cache.scratch_page], cache.page_size)
        self._planned: list[PagedSequence] = []
        self._copied = Fence(cache.data.device)
        self.plan([])

    def plan(self, sequences: Sequence[PagedSequence]) -> bool:
        rows = [*sequences, *[self._padding] * (len(self._query_lengths) - len(sequences))]
        changed = [i for i, row in enumerate(rows) if not self._planned or row is not self._planned[i]]
        if not changed:
            return False
        # What the last plan copied may still wait on the stream, out of memory that is written now: this
        # table and FlashInfer's own pinned buffer.
        self._copied.wait()
        if not self._planned or not self._replace(changed, rows):
            self._plan_anew(rows)
        self._copied.set()
        self._planned = rows
        return True

    def _replace(self, changed: Sequence[int], rows: Sequence[PagedSequence]) -> bool:
        """Copies the pages of the changed rows; False: they differ in more."""
        replaced = [self._table.replace(i, rows[i]) for i in changed]
        if None in replaced:
            return False
        for pages in replaced:
            self._pages[pages].copy_(self._table.pages[pages], non_blocking=True)
        return True

    def _plan_anew(self, rows: Sequence[PagedSequence]) -> None:
        table = self._table
        table.fill(self._query_lengths, rows)
        pages = slice(0, table.num_pages)
        # Given pages in host memory, FlashInfer would wait for their copy and so for all that runs.
        self._pages[pages].copy_(table.pages[pages], non_blocking=True)
        self._wrapper.plan(
            table.query_starts,
            table.page_starts,
            self._pages[pages],
            table.last_page_lengths,
            uniform_q_len=self._query_lengths[0],
            **self._shape,
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._cache.keys[layer].index_copy_(0, self._slots, key)
        self._cache.values[layer].index_copy_(0, self._slots, value)
        out = query.new_empty(query.shape)
        self._wrapper.run(query, self._cache.paged[layer], out=out)
        return out
