"""`FusedUnmasker` as Triton kernels: two over the rows of logits (see `triton_rows`), then `_choose`, one
program a request: its rule, its commits, its seat.

B requests in a batch, L positions in the longest block, R rows of logits, M seats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backend.sampling import seats as codes
from backend.sampling.seats import RULES, Seats
from backend.sampling.triton_rows import judge_row, may_unmask, scan_tile

TILE = 4096
"""16 logits a thread; 992 programs for one block of LLaDA, whose vocabulary makes 31 tiles."""

CHUNK = 32
"""Positions that `_choose` compares with all others at a time."""

THRESHOLD = tl.constexpr(RULES["threshold"])
PACED = tl.constexpr(RULES["paced_threshold"])
FACTOR = tl.constexpr(RULES["factor"])
NOTHING = tl.constexpr(codes.NOTHING)
FAILED = tl.constexpr(codes.FAILED)


@triton.jit
def _compact(place, num_rows, seat_of, num_places, is_masked, only_first, step,
             L: tl.constexpr, ROW: tl.constexpr, AT_A_TIME: tl.constexpr):  # fmt: skip
    count = 0
    for start in range(0, num_places, AT_A_TIME):
        places = start + tl.arange(0, AT_A_TIME)
        within = places < num_places
        seat = tl.load(seat_of + places // L, mask=within, other=0).to(tl.int64)
        flags = may_unmask(is_masked, only_first, step, seat, places % L, within, ROW).to(tl.int32)
        row = count + tl.cumsum(flags, 0) - flags
        tl.store(place + row, places, mask=(flags != 0) & (row < num_rows))
        count += tl.sum(flags, 0)
    for start in range(0, num_rows, AT_A_TIME):
        rows = start + tl.arange(0, AT_A_TIME)
        tl.store(place + rows, tl.full((AT_A_TIME,), -1, tl.int32), mask=(rows >= count) & (rows < num_rows))


@triton.jit
def _choose(seat_of, score, token, commits, tokens, is_masked, known, only_first, step, length, rule, threshold,
            factor, num_steps, by_timesteps, shares,
            L: tl.constexpr, ROW: tl.constexpr, PLACES: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    request = tl.program_id(0)
    seat = tl.load(seat_of + request).to(tl.int64)
    offset = tl.arange(0, PLACES)
    within = offset < L
    masked = tl.load(is_masked + seat * ROW + offset, mask=within, other=0) != 0
    num_masked = tl.sum(masked.to(tl.int32), 0)
    candidate = may_unmask(is_masked, only_first, step, seat, offset, within, ROW)
    own = tl.load(score + request * L + offset, mask=within, other=0.0)
    own = tl.where(candidate, own, -float("inf"))
    rank = tl.zeros((PLACES,), tl.int32)
    for start in tl.static_range(0, PLACES, CHUNK):
        rival = start + tl.arange(0, CHUNK)
        competes = may_unmask(is_masked, only_first, step, seat, rival, rival < L, ROW)
        theirs = tl.load(score + request * L + rival, mask=rival < L, other=0.0)
        theirs = tl.where(competes, theirs, -float("inf"))[None, :]
        leads = (theirs > own[:, None]) | ((theirs == own[:, None]) & (rival[None, :] < offset[:, None]))
        rank += tl.sum(leads.to(tl.int32), 1)

    by = tl.load(rule + seat * (ROW // 4))
    now = tl.load(step + seat * (ROW // 4))
    positions = tl.load(length + seat * (ROW // 4))
    steps = tl.maximum(tl.load(num_steps + seat * (ROW // 4)), 1)  # a seat that was never taken has 0
    base = positions // steps
    remainder = positions % steps
    count = base + (now < remainder).to(tl.int32)
    if tl.load(by_timesteps + seat * ROW) != 0:
        share = tl.load(shares + steps * L + tl.minimum(now, L - 1))
        count = tl.where(now < steps - 1, (num_masked.to(tl.float32) * share).to(tl.int32), num_masked)
    if by == PACED:
        due = (now + 1) * base + tl.minimum(now + 1, remainder)
        count = tl.maximum(due - (positions - num_masked), 1)
    if by == FACTOR:
        least = 1.0 - tl.load(factor + seat * (ROW // 8)) / (rank + 2).to(tl.float64)
        reaches = (own.to(tl.float64) >= least) | (rank == 0)
        count = tl.min(tl.where(reaches, PLACES, rank), 0)
    if by == THRESHOLD:
        count = PLACES
    # No quota of nothing hides a broken position or holds up the only one.
    is_only = (tl.load(only_first + seat * ROW) != 0) & (now == 0)
    has_broken = tl.max((own == float("inf")).to(tl.int32), 0)
    count = tl.maximum(count, tl.maximum(has_broken, is_only.to(tl.int32)))
    is_sure = own >= tl.load(threshold + seat * (ROW // 4))
    is_sure = is_sure | ((by != THRESHOLD) & (by != PACED)) | (rank == 0)
    chosen = candidate & (rank < count) & is_sure

    drawn = tl.load(token + request * L + offset, mask=within, other=0)
    streamed = tl.load(known + seat * (ROW // 4) + offset, mask=within, other=-1)
    fails = drawn == FAILED
    drawn = tl.where((streamed >= 0) & (fails == 0), streamed, drawn)
    tl.store(commits + request * L + offset, tl.where(chosen, drawn, NOTHING), mask=within)
    ends = tl.max((chosen & fails).to(tl.int32), 0)
    tl.debug_barrier()  # what follows overwrites what other threads of this program have read
    tl.store(tokens + seat * (ROW // 8) + offset, drawn.to(tl.int64), mask=chosen & (fails == 0))
    tl.store(is_masked + seat * ROW + offset, masked & (chosen == 0) & (ends == 0), mask=within & (num_masked > 0))
    tl.store(step + seat * (ROW // 4), now + 1, mask=num_masked > 0)


class UnmaskKernels:
    """Launches the kernels; owns the memory between them. See `FusedUnmasker`.

    Args:
        tile: columns of a tile, a power of 2.

    Attributes:
        score: float32 [max_batch * L], by place, of the last step's rows; +inf where logits are not finite.
        token: int32 [max_batch * L], what would be committed there.
    """

    def __init__(
        self,
        max_rows: int,
        max_batch: int,
        longest_block: int,
        vocab_size: int,
        mask_token_id: int,
        device: torch.device,
        tile: int = TILE,
    ) -> None:
        self._vocab_size, self._mask_token_id, self._tile = vocab_size, mask_token_id, tile
        self._num_tiles = triton.cdiv(vocab_size, tile)
        of_tiles = (max_rows, self._num_tiles)
        self._top = torch.empty(of_tiles, dtype=torch.float32, device=device)
        self._top_id = torch.empty(of_tiles, dtype=torch.int32, device=device)
        self._rest, self._extra = torch.empty_like(self._top), torch.empty_like(self._top)
        self._shaped_rest = torch.empty(of_tiles, dtype=torch.float64, device=device)
        self.score = torch.empty(max_batch * longest_block, dtype=torch.float32, device=device)
        self.token = torch.empty(max_batch * longest_block, dtype=torch.int32, device=device)

    def compact(self, place: Tensor, seat_of: Tensor, seats: Seats) -> None:
        """Fills `place` int32 [R]; see `FusedUnmasker.compact`."""
        num_places = len(seat_of) * seats.longest_block
        _compact[(1,)](
            place, len(place), seat_of, num_places, seats.is_masked, seats.only_first, seats.step,
            seats.longest_block, seats.row_bytes, 2048, num_warps=8,
        )  # fmt: skip

    def unmask(self, logits: Tensor, place: Tensor, seat_of: Tensor, seats: Seats, commits: Tensor) -> None:
        """Fills `commits` int32 [B, L]; see `FusedUnmasker.run`."""
        of_rows = (logits, logits.stride(0), place, seat_of, seats.is_masked, seats.only_first, seats.step, seats.rule)
        of_tiles = (self._top, self._top_id, self._rest, self._shaped_rest, self._extra)
        columns = (self._vocab_size, self._mask_token_id)
        layout = (seats.longest_block, seats.row_bytes)
        rows = len(logits)
        scan_tile[(self._num_tiles, rows)](
            *of_rows, seats.temperature, *of_tiles, *columns, *layout, self._tile, self._num_tiles,
            num_warps=8, maxnreg=64,  # so that four programs find room on a multiprocessor, 32 kB in flight
        )  # fmt: skip
        judge_row[(rows,)](
            *of_rows, seats.temperature, seats.seed, seats.block, *of_tiles, self.score, self.token, *columns,
            *layout, self._tile, self._num_tiles, triton.next_power_of_2(self._num_tiles), min(self._tile, 1024),
            num_warps=4,
        )  # fmt: skip
        _choose[(len(seat_of),)](
            seat_of, self.score, self.token, commits, seats.tokens, seats.is_masked, seats.known, seats.only_first,
            seats.step, seats.length, seats.rule, seats.threshold, seats.factor, seats.num_steps, seats.by_timesteps,
            seats.shares, *layout, triton.next_power_of_2(seats.longest_block), CHUNK, num_warps=4,
        )  # fmt: skip
