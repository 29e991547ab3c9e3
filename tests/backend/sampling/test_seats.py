from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from backend.core.request import Request
from backend.core.sampling_params import MAX_SEED, SamplingParams
from backend.core.unmask_schedule import timesteps
from backend.sampling.seats import RULES, Seats
from tests.backend.sampling.seating import CPU, FIELDS, any_request, assert_seated

PARAMS = SamplingParams(max_tokens=8, canvas_length=8, block_length=4, steps_per_block=4)
MASK = 9


def seats_of(num_seats: int = 5, longest_block: int = 6, logits_shift: int = 1) -> Seats:
    return Seats(num_seats, longest_block, CPU, mask_token_id=MASK, logits_shift=logits_shift)


def request(**options: object) -> Request:
    return Request("r", [1], replace(PARAMS, **options), 0.0)  # type: ignore[arg-type]


def test_a_seat_holds_what_the_request_says() -> None:
    seats = seats_of()
    late = Request(
        "r",
        [1],
        replace(PARAMS, unmasking="factor", factor=1.7, temperature=0.3, seed=-MAX_SEED - 1, steps_per_block=3),
        0.0,
        finished_blocks=[2] * 4,
        known=[MASK, 5],
    )
    late.commit([(0, 3), (2, 0)])
    fresh = request(seed=MAX_SEED, quota_schedule="timesteps", confidence_threshold=0.7, unmasking="random")
    seats.take([3, 1], [late, fresh])
    assert_seated(seats, [3, 1], [late, fresh], MASK)
    assert seats.known[3].tolist() == [MASK, 5, -1, -1, -1, -1] and seats.known[1].tolist() == [-1] * 6
    pair = [3, 1]
    assert seats.block[pair].tolist() == [1, 0] and seats.length[pair].tolist() == [4, 4]
    assert seats.rule[pair].tolist() == [RULES["factor"], RULES["random"]]
    assert seats.threshold[1] == torch.tensor(0.7) and seats.factor[3] == 1.7 and seats.temperature[3] == 0.3
    assert seats.seed[pair].tolist() == [-MAX_SEED - 1, MAX_SEED]
    assert seats.num_steps[pair].tolist() == [3, 4] and seats.by_timesteps[pair].tolist() == [False, True]
    assert seats.only_first[pair].tolist() == [False, True], "only before its first step, and with shifted logits"


def test_all_other_seats_stay_as_they_are() -> None:
    seats = seats_of()
    rng = random.Random(0)
    first = [any_request(rng, 6, 9) for _ in range(5)]
    seats.take([4, 3, 2, 1, 0], first)
    before = {field: getattr(seats, field).clone() for field in FIELDS}
    seats.take([], [])
    seats.take([2], [request(seed=77)])
    assert seats.seed[2] == 77
    for field, values in before.items():
        now = getattr(seats, field)
        assert torch.equal(now[[0, 1, 3, 4]], values[[0, 1, 3, 4]]), field
    seats.leave([3, 0])
    assert seats.is_masked.any(dim=1).tolist() == [False, True, True, False, True]


def test_a_seat_never_taken_has_no_masks() -> None:
    seats = seats_of()
    assert not seats.is_masked.any() and (seats.tokens == MASK).all() and (seats.known == -1).all()


def test_shares_give_the_schedule_s_own_counts() -> None:
    table = seats_of(longest_block=256).shares
    for steps in (1, 2, 31, 32, 255, 256):
        for step in range(steps - 1):
            counts = (torch.arange(1, 257) * table[steps, step]).int().tolist()
            assert counts == [timesteps(left, steps, step) for left in range(1, 257)]


@pytest.mark.parametrize(
    "options",
    [{"block_length": 8}, {"temperature": 0.5, "top_k": 3}, {"temperature": 0.5, "top_p": 0.9}, {"logprobs": 0},
     {"temperature": 0.5, "min_p": 0.1}, {"remask_below": 0.5}, {"min_tokens": 1, "stop_token_ids": (3,)}],
)  # fmt: skip
def test_what_a_seat_cannot_do_does_not_fit(options: dict[str, object]) -> None:
    assert seats_of().fits(request())
    assert not seats_of().fits(request(**options))


def test_what_has_no_effect_fits() -> None:
    assert seats_of().fits(request(top_k=3, top_p=0.5, min_p=0.2)), "nothing is drawn at temperature 0"
    assert seats_of().fits(request(min_tokens=8)), "nothing stops the answer"
    later = Request("r", [1], replace(PARAMS, min_tokens=4, stop_token_ids=(3,)), 0.0, finished_blocks=[2] * 4)
    assert seats_of().fits(later)
