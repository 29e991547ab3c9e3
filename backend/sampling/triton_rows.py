"""Logits -> score and token of each row, as Triton kernels: the first two of `triton_unmask`'s three.

1. `scan_tile`, one program a tile of a row: its largest logit, that one's id and the sums that the row needs.
   Every logit is read once and nothing of size [R, V] is written. A tile is the same whatever the batch is:
   the same logits give the same token in every batch.
2. `judge_row`, one program a row: its tiles together, and where it is drawn the token: first the tile, then
   within it, by one random number.

R rows of logits, V columns, T tiles of TILE columns. Sums leave out the largest term, which is 1: what is left
of a sure position, 1e-9 say, keeps its digits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from backend.core import counter_random
from backend.sampling import seats
from backend.sampling.seats import RULES

ENTROPY = tl.constexpr(RULES["entropy"])
MARGIN = tl.constexpr(RULES["margin"])
MASKGIT_PLUS = tl.constexpr(RULES["maskgit_plus"])
RANDOM = tl.constexpr(RULES["random"])
FAILED = tl.constexpr(seats.FAILED)
ORDER = tl.constexpr(counter_random.ORDER)
NO_ID = tl.constexpr(2**31 - 1)
COLDEST = tl.constexpr(1e-30)  # colder temperatures are arg max all the same, and their inverse is no float32


@triton.jit
def uniform(seed, block, step, position, stream):
    """`counter_random.uniform`."""
    zero = position * 0
    first, second, _, _ = tl.philox(seed, zero + block, zero + step, position, zero + stream)
    bits = (first.to(tl.uint64) << 21) | (second.to(tl.uint64) >> 11)
    return bits.to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def may_unmask(is_masked, only_first, step, seat, offset, within, ROW: tl.constexpr):
    """`dense_unmask.candidates` of seats and offsets, False where they are not `within` bounds."""
    seat = seat + offset * 0  # of one shape, as their bounds are
    masked = tl.load(is_masked + seat * ROW + offset, mask=within, other=0) != 0
    waits = tl.load(only_first + seat * ROW, mask=within, other=0) != 0
    waits = waits & (tl.load(step + seat * (ROW // 4), mask=within, other=1) == 0)
    return masked & ((offset == 0) | (waits == 0))


@triton.jit
def scan_tile(logits, row_stride, place, seat_of, is_masked, only_first, step, rule, temperature,
               top, top_id, rest, shaped_rest, extra, vocab_size, mask_token_id,
               L: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr, T: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    row = tl.program_id(1)
    at = tl.load(place + row)
    if at < 0:
        return
    seat = tl.load(seat_of + at // L).to(tl.int64)
    if may_unmask(is_masked, only_first, step, seat, at % L, True, ROW) == 0:
        return
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    x = tl.where(ids == mask_token_id, -float("inf"), x)
    largest = tl.max(x, 0)
    # The lower id of equals; none where the tile holds nothing but NaN.
    largest_id = tl.min(tl.where(x == largest, ids, NO_ID), 0)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    # NaN is left in: it makes the sum NaN, by which `judge_row` knows that the row is broken.
    plain = tl.sum(tl.where(ids == largest_id, 0.0, tl.exp(x - base)), 0)
    heat = tl.load(temperature + seat * (ROW // 8))
    by = tl.load(rule + seat * (ROW // 4))
    inverse = tl.where(heat > 0, 1.0 / tl.maximum(heat, COLDEST), 1.0)
    shaped = plain.to(tl.float64)
    if heat > 0:
        lead = (x.to(tl.float64) - base.to(tl.float64)) * inverse
        shaped = tl.sum(tl.where(ids == largest_id, 0.0, tl.exp(lead)), 0)
    out = row * T + tile
    tl.store(top + out, largest)
    tl.store(top_id + out, largest_id)
    tl.store(rest + out, plain)
    tl.store(shaped_rest + out, shaped)
    if by == ENTROPY:
        lead = (x - base) * inverse.to(tl.float32)
        weight = tl.where(ids == largest_id, 0.0, tl.exp(lead))
        tl.store(extra + out, tl.sum(tl.where(weight > 0, weight * lead, 0.0), 0))
    if by == MARGIN:
        tl.store(extra + out, tl.max(tl.where(ids == largest_id, -float("inf"), x), 0))


@triton.jit
def judge_row(logits, row_stride, place, seat_of, is_masked, only_first, step, rule, temperature, seed, block,
               top, top_id, rest, shaped_rest, extra, score, token, vocab_size, mask_token_id,
               L: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr, T: tl.constexpr,
               TILES: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    at = tl.load(place + row)
    if at < 0:
        return
    seat = tl.load(seat_of + at // L).to(tl.int64)
    if may_unmask(is_masked, only_first, step, seat, at % L, True, ROW) == 0:
        return
    tiles = tl.arange(0, TILES)
    within = tiles < T
    of_row = row * T + tiles
    tops = tl.load(top + of_row, mask=within, other=-float("inf"))
    rests = tl.load(rest + of_row, mask=within, other=0.0).to(tl.float64)
    largest = tl.max(tops, 0)
    ids = tl.load(top_id + of_row, mask=within, other=NO_ID)
    best = tl.min(tl.where(tops == largest, ids, NO_ID), 0)
    leads = tops.to(tl.float64) - largest.to(tl.float64)
    has_best = ids == best
    # Of each tile: all of it, in units of the row's largest term; the row's without that term.
    num_others = tl.where(has_best, 0.0, 1.0)
    total_rest = tl.sum(tl.where(within, (num_others + rests) * tl.exp(leads), 0.0), 0)
    is_sound = total_rest < float("inf")  # NaN is not, and NaN it is where NaN or an infinity is the largest
    heat = tl.load(temperature + seat * (ROW // 8))
    by = tl.load(rule + seat * (ROW // 4))
    is_drawn = heat > 0
    inverse = tl.where(is_drawn, 1.0 / tl.maximum(heat, COLDEST), 1.0)
    shaped = tl.load(shaped_rest + of_row, mask=within, other=0.0)
    shares = tl.exp(leads * inverse)
    shaped_total = 1.0 + tl.sum(tl.where(within, (num_others + shaped) * shares, 0.0), 0)
    judged = 1.0 / (1.0 + total_rest)
    chosen = best
    counter_block = tl.load(block + seat * (ROW // 4))
    counter_step = tl.load(step + seat * (ROW // 4))
    counter_seed = tl.load(seed + seat * (ROW // 8))
    offset = at % L
    if is_drawn & is_sound:
        u = uniform(counter_seed, counter_block, counter_step, offset, 0)
        tile_weights = tl.where(within, (1.0 + shaped) * shares, 0.0)
        cumulative = tl.cumsum(tile_weights, 0)
        target = u * tl.sum(tile_weights, 0)
        last = tl.max(tl.where(tile_weights > 0, tiles, 0), 0)
        tile = tl.minimum(tl.min(tl.where((cumulative > target) & (tile_weights > 0), tiles, TILES), 0), last)
        before = tl.sum(tl.where(tiles == tile, cumulative - tile_weights, 0.0), 0)
        inner = (target - before) / tl.sum(tl.where(tiles == tile, shares, 0.0), 0)
        tile_top = tl.sum(tl.where(tiles == tile, tops, 0.0), 0).to(tl.float64)
        of_logits = logits + row.to(tl.int64) * row_stride
        done = tl.zeros((), tl.float64)
        chosen = tl.full((), NO_ID, tl.int32)
        last_id = tl.zeros((), tl.int32)
        for start in range(0, TILE, CHUNK):
            columns = tile * TILE + start + tl.arange(0, CHUNK)
            x = tl.load(of_logits + columns, mask=columns < vocab_size, other=-float("inf")).to(tl.float64)
            weights = tl.exp((tl.where(columns == mask_token_id, -float("inf"), x) - tile_top) * inverse)
            sums = done + tl.cumsum(weights, 0)
            chosen = tl.minimum(chosen, tl.min(tl.where((sums > inner) & (weights > 0), columns, NO_ID), 0))
            last_id = tl.maximum(last_id, tl.max(tl.where(weights > 0, columns, 0), 0))
            done += tl.sum(weights, 0)
        chosen = tl.minimum(chosen, last_id)  # rounding must not lead past the last one
        logit = tl.load(of_logits + chosen).to(tl.float32)
        lead = logit.to(tl.float64) - largest
        if by == MASKGIT_PLUS:
            judged = tl.exp(lead * inverse) / shaped_total
        else:
            judged = tl.exp(lead) / (1.0 + total_rest)
    extras = tl.load(extra + of_row, mask=within, other=0.0).to(tl.float64)
    if by == ENTROPY:
        # sum p log p = sum w y / Z - log Z; tile t's y is measured from its own largest.
        terms = shares * (extras + leads * inverse * (num_others + shaped))
        judged = tl.sum(tl.where(within & (shares > 0), terms, 0.0), 0) / shaped_total - tl.log(shaped_total)
    if by == MARGIN:
        second = tl.max(tl.where(within, tl.where(has_best, extras, tops.to(tl.float64)), -float("inf")), 0)
        judged = (1.0 - tl.exp((second - largest) * inverse)) / shaped_total
    if by == RANDOM:
        judged = uniform(counter_seed, counter_block, counter_step, offset, ORDER)
    tl.store(score + at, tl.where(is_sound, judged, float("inf")).to(tl.float32))
    tl.store(token + at, tl.where(is_sound, chosen, FAILED))
