"""The torch version against `SamplingBatch`, which decides the same on the host."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from backend.core.request import Request
from backend.core.sampling_params import UNMASKING
from backend.sampling import dense_unmask
from backend.sampling.fused import FusedUnmasker
from backend.sampling.seats import FAILED, NOTHING, Seats
from tests.backend.sampling.seating import CPU, advance, any_request, assert_seated, host_commits, places_of

L, V, MASK = 5, 12, 7


def unmasker(max_batch: int = 8) -> FusedUnmasker:
    return FusedUnmasker(max_batch * L, max_batch, L, CPU, vocab_size=V, mask_token_id=MASK, use_triton=False)


def seated(requests: list[Request], logits_shift: int) -> tuple[Seats, torch.Tensor]:
    """In seats of descending numbers; seat 0 is nobody's."""
    seats = Seats(len(requests) + 1, L, CPU, mask_token_id=MASK, logits_shift=logits_shift)
    seat_of = list(range(len(requests), 0, -1))
    seats.take(seat_of, requests)
    return seats, torch.tensor(seat_of, dtype=torch.int32)


def logits_of(rng: torch.Generator, rows: int) -> torch.Tensor:
    """Equal rows, equal logits within a row, some that cannot be and some beyond the vocabulary."""
    logits = torch.randint(-6, 7, (rows, V + 2), generator=rng) / 2
    logits[torch.rand(rows, V + 2, generator=rng) < 0.1] = -torch.inf
    logits[:, 0] = 0.5
    twins = torch.randint(0, rows, (rows,), generator=rng)
    return logits[twins]


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 7), st.sampled_from([0, 1]), st.booleans())
def test_whole_blocks_are_the_host_s(seed: int, batch: int, logits_shift: int, is_compact: bool) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    requests = [any_request(rng, L, V) for _ in range(batch)]
    seats, seat_of = seated(requests, logits_shift)
    padded = torch.cat((seat_of, torch.zeros(1, dtype=torch.int32)))
    fused = unmasker()
    while any(request.block.num_masked for request in requests):
        logits = logits_of(generator, (batch + 1) * L)
        place = fused.all_places(batch + 1)
        if is_compact:
            places = places_of(requests, L, logits_shift)
            place = fused.compact(padded, seats, len(places) + 3)
            assert place.tolist() == places + [-1] * 3
        commits = fused.run(logits[place.long()], place, padded, seats).tolist()
        expected = host_commits(requests, logits[: batch * L, :V], L, MASK, logits_shift)
        assert commits == [*expected, [NOTHING] * L]
        advance(requests, expected)
        assert_seated(seats, seat_of.tolist(), requests, MASK)
    commits = fused.run(logits, fused.all_places(batch + 1), padded, seats)
    assert (commits == NOTHING).all(), "what is done stays as it is"
    assert_seated(seats, seat_of.tolist(), requests, MASK)


@pytest.mark.parametrize("unmasking", UNMASKING)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_fail_their_own_request_in_this_very_step(unmasking: str, broken: float) -> None:
    for seed in range(12):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        requests = [any_request(rng, L, V, unmasking) for _ in range(3)]
        seats, seat_of = seated(requests, 0)
        logits = torch.randn(3 * L, V, generator=generator)
        row = L + rng.choice([offset for offset, token in enumerate(requests[1].block.tokens) if token is None])
        expected = host_commits(requests[::2], logits[[*range(L), *range(2 * L, 3 * L)]], L, MASK, 0)
        if broken == -torch.inf:
            logits[row] = broken
        else:
            logits[row, rng.choice([t for t in range(V) if t != MASK])] = broken
        fused = unmasker()
        commits = fused.run(logits, fused.all_places(3), seat_of, seats).tolist()
        assert commits[1][row - L] == FAILED
        assert commits[::2] == expected
        assert FAILED not in seats.tokens, "a next step that is already under way still has ids to look up"
        after = fused.run(logits, fused.all_places(3), seat_of, seats)
        assert (after[1] == NOTHING).all()


def test_nan_at_the_mask_token_or_beyond_the_vocabulary_is_no_matter() -> None:
    requests = [any_request(random.Random(1), L, V)]
    seats, seat_of = seated(requests, 0)
    logits = torch.randn(L, V + 2, generator=torch.Generator().manual_seed(0))
    expected = host_commits(requests, logits[:, :V], L, MASK, 0)
    logits[:, MASK] = torch.nan
    logits[:, V:] = torch.inf
    fused = unmasker()
    assert fused.run(logits, fused.all_places(1), seat_of, seats).tolist() == expected


def test_too_few_rows_for_all_places_leaves_the_last_out() -> None:
    requests = [any_request(random.Random(3), L, V) for _ in range(3)]
    seats, seat_of = seated(requests, 0)
    places = places_of(requests, L, 0)
    fused = unmasker()
    assert fused.compact(seat_of, seats, len(places) - 2).tolist() == places[:-2]


@pytest.mark.parametrize(("rows", "columns", "batch"), [(41, V, 8), (40, V, 9), (40, V - 1, 8)])
def test_more_than_it_was_made_for_is_refused(rows: int, columns: int, batch: int) -> None:
    seats, _ = seated([], 0)
    with pytest.raises(ValueError, match=f"{rows} x {columns} logits of {batch} requests; made for at most 40 rows"):
        place, seat_of = torch.full((rows,), -1), torch.zeros(batch, dtype=torch.int32)
        unmasker().run(torch.zeros(rows, columns), place, seat_of, seats)


def test_the_host_asks_for_no_value() -> None:
    """Fake tensors have none to give."""
    seats, seat_of = seated([any_request(random.Random(0), L, V) for _ in range(2)], 1)
    with FakeTensorMode() as mode:
        fake = copy.copy(seats)
        for name, value in vars(seats).items():
            if isinstance(value, torch.Tensor):
                setattr(fake, name, mode.from_tensor(value))
        place, logits = torch.zeros(2 * L, dtype=torch.int64), torch.zeros(2 * L, V)
        commits = dense_unmask.unmask(logits, place, mode.from_tensor(seat_of).long(), fake, MASK)
        assert commits.shape == (2, L)
        assert dense_unmask.compact(fake.is_masked, 3).shape == (3,)
        with pytest.raises(DataDependentOutputException):
            bool(commits.max() > 0)
