"""StepPlan -> one packed batch; masked tokens of those that have a seat lie there: T tokens, B requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from backend.attention.kv_cache import KVCache, PagedSequence
from backend.core.block import Block
from backend.core.cache_policy import Recompute
from backend.core.request import Request
from backend.engine.block_state import Part
from backend.engine.packing import Ints, Packing, min_rows
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

    Args:
        rows: of each request, None where it has no seat; M requests have one.
        parts: at least of those that have none, by their place among the requests.

    Attributes:
        token_ids, positions, slots: int64 [T]; masks in the rows [N] that `fill_in` sets.
        seat_of: int32 [M].
        first_row, least_row: int64 [M], the packed rows of each seated block's first position and of its
            sequence's first query.
        begins: [B], the latter of all requests, on the host.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        rows: Sequence[Row | None],
        parts: Mapping[int, Part],
        num_prefills: int,
        cache: KVCache,
        mask_token_id: int,
    ) -> None:
        device, packing = cache.data.device, Packing()
        token_rows: list[Ints] = []
        token_seats: list[Ints] = []
        token_offsets: list[Ints] = []
        first_rows: list[int] = []
        least_rows: list[int] = []
        for i, (request, row) in enumerate(zip(requests, rows, strict=True)):
            if row is None:
                part = parts[i]
                packing.add(part.ids, part.slots, part.positions, part.kv)
                continue
            if i < num_prefills:
                ids = _whole_sequence(request, mask_token_id)
                begin = packing.add(ids, row.kv.slots, np.arange(len(ids)), row.kv)
                first_rows.append(begin + row.start)
            else:
                positions = np.arange(row.start, row.query_end)
                ids = np.full(len(positions), mask_token_id)
                begin = packing.add(ids, row.kv.slots[row.start : row.query_end], positions, row.kv)
                first_rows.append(begin)
                offsets = np.arange(row.end - row.start)
                token_rows.append(begin + offsets)
                token_seats.append(np.full(len(offsets), row.seat))
                token_offsets.append(offsets)
            least_rows.append(begin)
        self.spans, self.begins = packing.spans, packing.begins
        seats = [row.seat for row in rows if row is not None]
        arrays = [
            *packing.arrays(cache, min_rows(device)),
            *map(_joined, (token_rows, token_seats, token_offsets)),
            *(np.array(of_rows, dtype=np.int64) for of_rows in (seats, first_rows, least_rows)),
        ]
        self.token_ids, self.slots, self.positions, *rest = upload(arrays, device)
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


def _whole_sequence(request: Request, mask_token_id: int) -> Ints:
    known = np.array((*request.prompt, *request.response), dtype=np.int64)
    return np.concatenate((known, np.full(request.sequence_length - len(known), mask_token_id)))


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
