"""StepPlan -> one packed batch whose masked tokens lie on the device: T tokens, B requests, L the longest block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.attention.base import SequenceSpan
from backend.attention.kv_cache import KVCache, PagedSequence
from backend.core.block import Block
from backend.core.cache_policy import Recompute
from backend.core.queries import commits_only_first
from backend.core.request import Request
from backend.core.step import StepPlan
from backend.engine.staging import upload


class Row:
    """A request's part of a batch for as long as it denoises one block: nothing here changes with a commit.

    Attributes:
        seat: where the device keeps the block's tokens.
        kv: where the sequence's KV lies.
        start, end: the block's absolute positions.
        query_end: where the positions end that a denoising step computes; they start at the block.
        fits: whether the device unmasks it; otherwise the host does.
    """

    def __init__(self, request: Request, seat: int, cache: KVCache, fits: bool) -> None:
        self.block: Block = request.block
        self.seat, self.fits = seat, fits
        self.kv = PagedSequence(cache, request.pages, request.sequence_length)
        self.start, self.end = request.block_start, request.block_start + request.block.length
        is_block = request.params.policy.recompute is Recompute.BLOCK
        self.query_end = self.end if is_block else request.sequence_length


class DeviceBatch:
    """Whole sequences of the prefills, then the queries of the decodes, then padding (see `PackedBatch`).

    Attributes:
        token_ids, positions, slots: int64 [T]; masks in the rows [N] that `fill_in` sets.
        seat_of: int32 [B].
        first_row, least_row: int64 [B], the packed rows of each block's first position and of its
            sequence's first query.
        first_rows, begins: the same on the host.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        rows: Sequence[Row],
        num_prefills: int,
        cache: KVCache,
        mask_token_id: int,
        min_rows: int,
    ) -> None:
        ids: list[NDArray[np.int64]] = []
        positions: list[NDArray[np.int64]] = []
        slots: list[NDArray[np.int64]] = []
        token_rows: list[NDArray[np.int64]] = []
        token_seats: list[NDArray[np.int64]] = []
        token_offsets: list[NDArray[np.int64]] = []
        begins: list[int] = []
        first_rows: list[int] = []
        self.begins, self.first_rows = begins, first_rows
        self.spans: list[SequenceSpan] = []
        total = 0
        for i, (request, row) in enumerate(zip(requests, rows, strict=True)):
            begins.append(total)
            if i < num_prefills:
                size = request.sequence_length
                ids.append(_whole_sequence(request, mask_token_id))
                positions.append(np.arange(size))
                slots.append(row.kv.slots)
                first_rows.append(total + row.start)
            else:
                size = row.query_end - row.start
                ids.append(np.full(size, mask_token_id))
                positions.append(np.arange(row.start, row.query_end))
                slots.append(row.kv.slots[row.start : row.query_end])
                first_rows.append(total)
                offsets = np.arange(row.end - row.start)
                token_rows.append(total + offsets)
                token_seats.append(np.full(len(offsets), row.seat))
                token_offsets.append(offsets)
            self.spans.append(SequenceSpan(total, total + size, row.kv))
            total += size
        if padding := max(min_rows - total, 0):
            ids.append(np.zeros(padding, dtype=np.int64))
            slots.append(np.full(padding, cache.scratch_slot))
            positions.append(np.zeros(padding, dtype=np.int64))
        parts = (ids, positions, slots, token_rows, token_seats, token_offsets)
        seats = np.array([row.seat for row in rows])
        arrays = [*map(_joined, parts), seats, np.array(first_rows), np.array(begins)]
        self.token_ids, self.positions, self.slots, *rest = upload(arrays, cache.data.device)
        *self._from_seats, seat_of, self.first_row, self.least_row = rest
        self.seat_of = seat_of.int()

    def fill_in(self, tokens: Tensor) -> None:
        """Takes over what is committed by now: `tokens` [seats, L] of all seats."""
        rows, seats, offsets = self._from_seats
        self.token_ids.index_copy_(0, rows, tokens[seats, offsets])


def logit_rows(place: Tensor, first_row: Tensor, least_row: Tensor, longest_block: int, logits_shift: int) -> Tensor:
    """The packed row [R] that predicts each `place` [R] (`batch row * L + offset`, -1 is none: any row)."""
    place = place.long().clamp(min=0)
    batch_row, offset = place // longest_block, place % longest_block
    # Before position 0 there is no row: it is predicted by its own, as in Dream's own code.
    return torch.maximum(first_row[batch_row] + offset - logits_shift, least_row[batch_row])


def num_candidates(plan: StepPlan, logits_shift: int) -> int:
    """Positions that the step may unmask, at most: results of a step that still runs are not known here."""
    num = sum(request.block.num_masked for request in plan.decodes)
    for request in plan.prefills:
        num += 1 if commits_only_first(request, logits_shift) else request.block.num_masked
    return num


def _whole_sequence(request: Request, mask_token_id: int) -> NDArray[np.int64]:
    known = np.array((*request.prompt, *request.response), dtype=np.int64)
    return np.concatenate((known, np.full(request.sequence_length - len(known), mask_token_id)))


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
