"""Who has a seat."""

from __future__ import annotations

import pytest
import torch

from backend.attention.kv_cache import KVCache
from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.engine.device_batch import Row
from backend.engine.seating import Seating
from tests.backend.engine.test_engine import LLADA

PLAIN, HOSTED, ODD = {}, {"logprobs": 0}, {"cache_policy": "none"}


@pytest.fixture
def seating() -> Seating:
    """Three requests a step, six seats."""
    return Seating(3, KVCache(1, 4, 8, 1, 4, torch.float32, torch.device("cpu")), LLADA)


def request(options: dict[str, object]) -> Request:
    request = Request("r", [1, 2], SamplingParams(4, 4, 4, steps_per_block=4, **options), 0.0)  # type: ignore[arg-type]
    request.pages = [0]
    return request


def seats_of(rows: list[Row | None]) -> list[int | None]:
    return [row and row.seat for row in rows]


def test_whose_steps_are_not_alike_has_none(seating: Seating) -> None:
    long = Request("r", [1], SamplingParams(128, 128, 128), 0.0)
    rows = seating.rows_of([request(ODD), request(PLAIN), long, request(HOSTED)])
    assert [row and row.fits for row in rows] == [None, True, None, False]


def test_a_block_keeps_its_row_through_steps_without_it(seating: Seating) -> None:
    a, b, c = (request(PLAIN) for _ in range(3))
    first = seating.rows_of([a, b])
    seating.rows_of([c, request(ODD)])
    assert seating.rows_of([b, a]) == [first[1], first[0]]


def test_seats_are_taken_from_those_who_were_longest_away(seating: Seating) -> None:
    steps = [[request(PLAIN) for _ in range(3)] for _ in range(40)]
    before: set[int | None] = set()
    for step in steps:
        seats = set(seats_of(seating.rows_of(step)))
        assert len(seats) == 3 and not seats & before, "a step that runs writes them"
        assert seating.scratch_seat not in seats
        before = seats


def test_those_beyond_the_most_have_none_and_give_back_what_they_had(seating: Seating) -> None:
    first, second = ([request(PLAIN) for _ in range(3)] for _ in range(2))
    for _ in range(40):
        seating.rows_of(first)
        seating.rows_of(second)
        seats = seats_of(seating.rows_of([*first, *second]))
        assert None not in seats[:3] and seats[3:] == [None] * 3
        seats = seats_of(seating.rows_of([*second, *first]))
        assert None not in seats[:3] and seats[3:] == [None] * 3


def test_whom_the_host_chooses_for_is_told_its_tokens_and_never_masked(seating: Seating) -> None:
    hosted, plain = request(HOSTED), request(PLAIN)
    rows = seating.rows_of([hosted, plain])
    hosted.commit([(2, 7)])
    rows = seating.rows_of([hosted, plain])
    assert rows[0] is not None and rows[1] is not None
    tokens = seating.seats.tokens[[rows[0].seat, rows[1].seat], :4].tolist()
    assert tokens == [[60, 60, 7, 60], [60] * 4]
    masked = seating.seats.is_masked[[rows[0].seat, rows[1].seat], :4].tolist()
    assert masked == [[False] * 4, [True] * 4]
