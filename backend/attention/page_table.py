"""The page table of one batch as FlashInfer reads it, in host memory that the GPU can copy from by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from backend.attention.kv_cache import PagedSequence


class PageTable:
    """Compressed rows, int32: sequence i has query rows `query_starts[i : i + 2]` and pages `page_starts[i : i + 2]`.

    Tensors and, under the same names with an underscore, arrays over the same memory.

    Attributes:
        query_starts, page_starts: [sequences + 1].
        last_page_lengths: [sequences], tokens on each one's last page.
        pages: [pages of all sequences].
    """

    def __init__(self, max_sequences: int, max_pages: int, *, is_pinned: bool) -> None:
        def new(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, pin_memory=is_pinned)

        self.query_starts, self.page_starts = new(max_sequences + 1), new(max_sequences + 1)
        self.last_page_lengths, self.pages = new(max_sequences), new(max_pages)
        self._query_starts, self._page_starts = self.query_starts.numpy(), self.page_starts.numpy()
        self._last_page_lengths, self._pages = self.last_page_lengths.numpy(), self.pages.numpy()
        self.num_sequences = self.num_pages = 0

    def fill(self, query_lengths: Sequence[int], sequences: Sequence[PagedSequence]) -> None:
        """Makes it the table of these sequences."""
        count = self.num_sequences = len(sequences)
        np.cumsum(query_lengths, out=self._query_starts[1 : count + 1])
        np.cumsum([len(sequence.pages) for sequence in sequences], out=self._page_starts[1 : count + 1])
        self._last_page_lengths[:count] = [sequence.last_page_length for sequence in sequences]
        self.num_pages = int(self._page_starts[count])
        np.concatenate([sequence.pages for sequence in sequences], out=self._pages[: self.num_pages])

    def replace(self, row: int, sequence: PagedSequence) -> slice | None:
        """Puts another sequence into a row, if it has as many pages, as full: which pages changed, else None."""
        pages = slice(int(self._page_starts[row]), int(self._page_starts[row + 1]))
        is_alike = sequence.last_page_length == self._last_page_lengths[row]
        if not is_alike or len(sequence.pages) != pages.stop - pages.start:
            return None
        self._pages[pages] = sequence.pages
        return pages
