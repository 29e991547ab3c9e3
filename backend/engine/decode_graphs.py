"""Steps of denoising alone, recorded as CUDA graphs: one per batch size and number of rows of logits.

A step is then one launch, whatever the model's depth, sampling included: what it reads lies at fixed
addresses, and what it commits stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backend.attention.base import AttentionBackend
from backend.attention.kv_cache import KVCache
from backend.engine.device_batch import Row, logit_rows
from backend.engine.staging import upload
from backend.models.layers import Transformer
from backend.sampling.fused import FusedUnmasker
from backend.sampling.seats import Seats

Step = Callable[[], tuple[Tensor, Tensor]]

_WARM_UPS = 2


# The host should launch the kernels of larger steps in less time than these take; not measured.
_LARGEST = 64


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that are recorded: 1, 2, 4, then every eighth; a step is padded to the next."""
    largest = min(max_num_seqs, _LARGEST)
    return sorted({min(size, largest) for size in (1, 2, 4, *range(8, largest + 8, 8))})


class _Size:
    """What the graphs of one batch size share: B requests of `block_length` query tokens each."""

    def __init__(
        self, size: int, block_length: int, cache: KVCache, attention: AttentionBackend, max_length: int, scratch: int
    ) -> None:
        device = cache.data.device
        self.rows: list[Row] = []
        self.seat_of = torch.full((size,), scratch, dtype=torch.int32, device=device)
        self.positions = torch.zeros(size * block_length, dtype=torch.int64, device=device)
        self.slots = torch.full((size * block_length,), cache.scratch_slot, dtype=torch.int64, device=device)
        self.first_row = torch.arange(size, device=device) * block_length
        self.attention = attention.graph_attention(size, block_length, max_length, self.slots)
        self.attention.plan(())
        self.steps: dict[int, Step] = {}
        """By the number of rows of logits; see `DecodeGraphs.run`."""


class DecodeGraphs:
    """See the module. On a CPU the same steps run without a recording.

    Args:
        scratch_seat: one where nothing is ever masked, for the rows of the padding.
        block_length: of the requests that it takes.
        max_length: the longest prompt + canvas that it takes.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        attention: AttentionBackend,
        seats: Seats,
        unmasker: FusedUnmasker,
        *,
        sizes: Sequence[int],
        scratch_seat: int,
        block_length: int,
        max_length: int,
    ) -> None:
        self._model, self._cache, self._seats, self._unmasker = model, cache, seats, unmasker
        self._scratch_seat, self.block_length, self._max_length = scratch_seat, block_length, max_length
        self._pool: Any = None
        self._sizes = [
            (size, _Size(size, block_length, cache, attention, max_length, scratch_seat)) for size in sorted(sizes)
        ]
        # The largest first: the smaller ones find room in its memory.
        for size, of in reversed(self._sizes):
            for num_rows in _rows_of_logits(size * block_length):
                of.steps[num_rows] = self._recorded(of, num_rows)

    def fit(self, rows: Sequence[Row]) -> bool:
        """Whether a step of just these can be replayed."""
        length, longest = self.block_length, self._max_length
        return len(rows) <= self._sizes[-1][0] and all(
            row.end - row.start == length and row.query_end == row.end and row.kv.length <= longest for row in rows
        )

    def run(self, rows: list[Row], num_candidates: int) -> tuple[Tensor, Tensor]:
        """Launches a step of `rows`.

        Returns:
            Hidden states [B * `block_length`, D] and commits, int32 [B, L]; good until the next step.

        Args:
            num_candidates: how many of their positions are masked, at most.
        """
        of = next(of for size, of in self._sizes if size >= len(rows))
        if of.rows != rows:
            self._place(of, rows)
        enough = [num_rows for num_rows in of.steps if num_rows >= num_candidates]
        return of.steps[min(enough, default=max(of.steps))]()

    def wrap(self, wrapper: Callable[[Step], Step]) -> None:
        """Replaces every step by what `wrapper` makes of it: to measure them."""
        for _, of in self._sizes:
            of.steps = {num_rows: wrapper(step) for num_rows, step in of.steps.items()}

    def _place(self, of: _Size, rows: list[Row]) -> None:
        """Puts rows where the graphs of their size read them, behind whatever runs now."""
        size, length = len(of.seat_of), self.block_length
        seats = np.full(size, self._scratch_seat)
        positions = np.zeros((size, length), dtype=np.int64)
        slots = np.full((size, length), self._cache.scratch_slot)
        for i, row in enumerate(rows):
            seats[i] = row.seat
            positions[i] = np.arange(row.start, row.end)
            slots[i] = row.kv.slots[row.start : row.end]
        targets = (of.seat_of, of.positions, of.slots)
        sources = upload((seats, positions.ravel(), slots.ravel()), of.slots.device)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        of.attention.plan([row.kv for row in rows])
        of.rows = rows

    def _step(self, of: _Size, num_rows: int) -> tuple[Tensor, Tensor]:
        length, longest = self.block_length, self._seats.longest_block
        token_ids = self._seats.tokens.index_select(0, of.seat_of)[:, :length].reshape(-1)
        hidden = self._model(token_ids, of.positions, of.attention)
        place = self._unmasker.compact(of.seat_of, self._seats, num_rows)
        index = logit_rows(place, of.first_row, of.first_row, longest, self._model.config.logits_shift)
        logits = self._model.logits(hidden.index_select(0, index))
        return hidden, self._unmasker.run(logits, place, of.seat_of, self._seats)

    def _recorded(self, of: _Size, num_rows: int) -> Step:
        if self._cache.data.device.type == "cpu":
            return lambda: self._step(of, num_rows)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._step(of, num_rows)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = self._step(of, num_rows)
        self._pool = self._pool or graph.pool()

        def replay() -> tuple[Tensor, Tensor]:
            graph.replay()
            return result

        return replay


def _rows_of_logits(most: int) -> list[int]:
    """Late in a block few positions are masked: a quarter, half, or all of them get logits."""
    return sorted({max(most // share, 1) for share in (1, 2, 4)})
