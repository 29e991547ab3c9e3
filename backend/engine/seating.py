"""Which blocks have a seat on the device, where what is committed of them stays from step to step."""

from __future__ import annotations

from collections.abc import Sequence

from backend.attention.kv_cache import KVCache
from backend.core.block import Block
from backend.core.queries import is_steady
from backend.core.request import Request
from backend.engine.device_batch import Row
from backend.models.config import ModelConfig
from backend.sampling.seats import Seats

LONGEST_BLOCK = 64


class Seating:
    """Seats for a step that runs and for the next.

    Args:
        max_num_seqs: blocks of a step that have a seat, at most.

    Attributes:
        scratch_seat: one where nothing is ever masked.
    """

    def __init__(self, max_num_seqs: int, cache: KVCache, config: ModelConfig) -> None:
        self.scratch_seat = 2 * max_num_seqs
        self.seats = Seats(
            2 * max_num_seqs + 1,
            LONGEST_BLOCK,
            cache.data.device,
            mask_token_id=config.mask_token_id,
            logits_shift=config.logits_shift,
        )
        self._max_num_seqs = max_num_seqs
        self._cache = cache
        self._free = list(range(2 * max_num_seqs))
        self._rows: dict[Block, Row] = {}
        """The blocks that have a seat, those of the last step last."""

    def rows_of(self, requests: Sequence[Request]) -> list[Row | None]:
        """The row of each request of the next step, None for those that get no seat.

        Blocks that have none yet are seated with what is known of them here, if all their steps compute the same
        positions. The device unmasks those that fit: see `Seats.fits`.
        """
        rows = [self._rows.pop(request.block, None) for request in requests]
        steady = [i for i, row in enumerate(rows) if row or _may_sit(requests[i])]
        for i in steady[self._max_num_seqs :]:
            if row := rows[i]:
                self._free.append(row.seat)
                rows[i] = None
        taken: list[int] = []
        others: list[int] = []
        for i in steady[: self._max_num_seqs]:
            request, row = requests[i], rows[i]
            if row is None or not row.fits:  # tokens from the host are news every time
                taken.append(i)
            if row is None:
                row = rows[i] = Row(request, self._seat(), self._cache, self.seats.fits(request))
            if not row.fits:
                others.append(row.seat)
            self._rows[request.block] = row
        if taken:
            self.seats.take([row.seat for i in taken if (row := rows[i])], [requests[i] for i in taken])
        if others:
            self.seats.leave(others)
        return rows

    def _seat(self) -> int:
        if not self._free:
            oldest = next(iter(self._rows))
            self._free.append(self._rows.pop(oldest).seat)
        return self._free.pop()


def _may_sit(request: Request) -> bool:
    return is_steady(request) and request.block.length <= LONGEST_BLOCK
