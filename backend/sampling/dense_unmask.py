"""`FusedUnmasker` in torch: `SamplingBatch` step by step, without a word from the host.

The reference of the Triton kernels, and what runs where Triton does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.core.counter_random import ORDER
from backend.sampling.draw import sample, tempered, token_probability, top_probability
from backend.sampling.measure import MEASURES
from backend.sampling.seats import FAILED, NOTHING, RULES, Seats
from backend.sampling.seeds import uniform

_ROWS_AT_A_TIME = 64  # of float64 over a vocabulary: 75 MB a copy


def candidates(seats: Seats, seat_of: Tensor) -> Tensor:
    """Where a token may be unmasked: bool [B, L]."""
    waits = seats.only_first[seat_of] & (seats.step[seat_of] == 0)
    is_first = torch.arange(seats.longest_block, device=seat_of.device) == 0
    return seats.is_masked[seat_of] & (is_first | ~waits[:, None])


def compact(may_unmask: Tensor, num_rows: int) -> Tensor:
    """The places [num_rows] where `may_unmask` [B, L] holds, ascending, then -1."""
    flags = may_unmask.flatten()
    rank = flags.cumsum(0) - 1
    row = torch.where(flags, rank.clamp(max=num_rows), num_rows)
    place = torch.full((num_rows + 1,), -1, device=flags.device)
    return place.scatter_(0, row, torch.arange(len(flags), device=flags.device))[:num_rows]


def unmask(logits: Tensor, place: Tensor, seat_of: Tensor, seats: Seats, mask_token_id: int) -> Tensor:
    """See `FusedUnmasker.run`; `logits` [R, V], `place` and `seat_of` int64."""
    shape = (len(seat_of), seats.longest_block)
    num_places = shape[0] * shape[1]
    score = torch.full((num_places + 1,), -torch.inf, device=logits.device)
    token = torch.full((num_places + 1,), FAILED, device=logits.device)
    for rows, of_rows in zip(logits.split(_ROWS_AT_A_TIME), place.split(_ROWS_AT_A_TIME), strict=True):
        request, offset = of_rows.clamp(min=0) // shape[1], of_rows.clamp(min=0) % shape[1]
        index = torch.where(of_rows < 0, num_places, of_rows)  # padding: past the end
        judged = _judge(
            rows.float().index_fill(1, _scalar(mask_token_id, rows), -torch.inf), seat_of[request], offset, seats
        )
        score[index], token[index] = judged
    may_unmask = candidates(seats, seat_of)
    score = score[:-1].view(shape).where(may_unmask, -torch.inf)
    token = token[:-1].view(shape)
    chosen = may_unmask & _choose(score, seat_of, seats)
    has_failed = chosen & (token == FAILED)
    known = seats.known[seat_of].long()
    token = torch.where((known >= 0) & ~has_failed, known, token)
    _apply(seats, seat_of, token, chosen, has_failed)
    return token.where(chosen, NOTHING)


def _judge(logits: Tensor, seat: Tensor, offset: Tensor, seats: Seats) -> tuple[Tensor, Tensor]:
    """Score and token [N] of N rows; +inf and FAILED where they are broken, so that these outrank all others.

    `logits` float32 [N, V], -inf at the mask token; `seat` and `offset` [N].
    """
    rule, temperature = seats.rule[seat], seats.temperature[seat]
    counters = (seats.seed[seat], seats.block[seat].long(), seats.step[seat].long(), offset)
    confidence = top_probability(logits)
    is_drawn = temperature > 0
    shaped = tempered(logits, temperature.where(is_drawn, 1.0))
    token = sample(shaped, counters).where(is_drawn, logits.argmax(dim=-1))
    score = token_probability(logits, token).where(is_drawn, confidence)
    chance = shaped.gather(1, token[:, None]).squeeze(1)
    score = chance.float().where(is_drawn & (rule == RULES["maskgit_plus"]), score)
    for name, measure in MEASURES.items():
        score = measure(shaped).float().where(rule == RULES[name], score)
    score = uniform(*counters, stream=ORDER).float().where(rule == RULES["random"], score)
    is_broken = confidence.isnan()
    return score.masked_fill(is_broken, torch.inf), token.masked_fill(is_broken, FAILED)


def _choose(score: Tensor, seat_of: Tensor, seats: Seats) -> Tensor:
    """Which places each request's rule takes, bool [B, L], by `score` [B, L]; see `backend.sampling.unmask`."""
    rule, step, length = (x[seat_of].long() for x in (seats.rule, seats.step, seats.length))
    positions = torch.arange(score.shape[1], device=score.device).expand_as(score)
    order = score.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, positions)
    reaches = score >= 1 - seats.factor[seat_of][:, None] / (rank + 2)
    num_reaching = rank.masked_fill(reaches | (rank == 0), score.shape[1]).amin(dim=1)

    num_masked = seats.is_masked[seat_of].sum(dim=1)
    num_steps = seats.num_steps[seat_of].long().clamp(min=1)  # a seat that was never taken has 0
    base, remainder = length // num_steps, length % num_steps
    even = base + (step < remainder)
    share = seats.shares[num_steps, step.clamp(max=score.shape[1] - 1)]
    by_timesteps = (num_masked * share).long().where(step < num_steps - 1, num_masked)
    count = by_timesteps.where(seats.by_timesteps[seat_of], even)
    due = (step + 1) * base + remainder.minimum(step + 1)  # after the last step more than there is, which does no harm
    pace = (due - (length - num_masked)).clamp(min=1)

    count = num_reaching.where(rule == RULES["factor"], count)
    count = pace.where(rule == RULES["paced_threshold"], count)
    count = count.masked_fill(rule == RULES["threshold"], score.shape[1])
    # No quota of nothing hides a broken position or holds up the only one.
    must = (seats.only_first[seat_of] & (step == 0)) | (score == torch.inf).any(dim=1)
    count = count.maximum(must.long())
    has_threshold = (rule == RULES["threshold"]) | (rule == RULES["paced_threshold"])
    is_sure = (score >= seats.threshold[seat_of][:, None]) | ~has_threshold[:, None]
    return (rank < count[:, None]) & (is_sure | (rank == 0))


def _apply(seats: Seats, seat_of: Tensor, token: Tensor, chosen: Tensor, has_failed: Tensor) -> None:
    """Seats [B] after the step. Seats without masks get what they have, so they may come more than once."""
    is_masked = seats.is_masked[seat_of]
    runs = is_masked.any(dim=1)
    fails = has_failed.any(dim=1, keepdim=True)
    seats.tokens[seat_of] = token.where(chosen & ~has_failed, seats.tokens[seat_of])
    seats.is_masked[seat_of] = is_masked & ~chosen & ~fails
    seats.step[seat_of] += runs


def _scalar(value: int, like: Tensor) -> Tensor:
    return torch.full((1,), value, device=like.device)
