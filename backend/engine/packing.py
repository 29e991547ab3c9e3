"""Query tokens of many sequences, one after the other: what one forward computes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from backend.attention.base import SequenceSpan
from backend.attention.kv_cache import KVCache, PagedSequence

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def min_rows(device: torch.device) -> int:
    """How many rows the matrix products of a step have at least.

    On a CPU, those of very few rows take another path in the BLAS libraries, whose rounding would make a
    lone request's tokens differ from the same request's in a batch.
    """
    return 8 * max(torch.get_num_threads(), 2) if device.type == "cpu" else 1


class Packing:
    """T packed tokens of B sequences.

    Attributes:
        begins: [B], the packed row of each sequence's first query.
    """

    def __init__(self) -> None:
        self.spans: list[SequenceSpan] = []
        self.begins: list[int] = []
        self._num_rows = 0
        self._ids: list[Ints] = []
        self._slots: list[Ints] = []
        self._positions: list[Ints] = []

    def add(self, ids: Ints, slots: Ints, positions: Ints, kv: PagedSequence) -> int:
        """Appends the queries of a sequence, and returns the row of the first."""
        begin = self._num_rows
        self._num_rows += len(ids)
        self.begins.append(begin)
        self.spans.append(SequenceSpan(begin, self._num_rows, kv))
        self._ids.append(ids)
        self._slots.append(slots)
        self._positions.append(positions)
        return begin

    def arrays(self, cache: KVCache, min_rows: int) -> tuple[Ints, Ints, Ints]:
        """Token ids, slots and positions, int64 [T], padded to `min_rows` tokens."""
        parts = (self._ids, self._slots, self._positions)
        if padding := max(min_rows - self._num_rows, 0):
            for part, value in zip(parts, (0, cache.scratch_slot, 0), strict=True):
                part.append(np.full(padding, value))
        ids, slots, positions = map(np.concatenate, parts)
        return ids, slots, positions
