from __future__ import annotations

import numpy as np
import pytest
import torch

from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.sampling.sampler import FAILED, SamplingBatch

MASK = 9
CPU = torch.device("cpu")


def request(**options: object) -> Request:
    given = {"max_tokens": 4, "canvas_length": 4, "block_length": 4, "steps_per_block": 4, **options}
    return Request("r", [1], SamplingParams(**given), 0.0)  # type: ignore[arg-type]


def choose(requests: list[Request], logits: torch.Tensor, masked: list[int]) -> dict[int, int]:
    batch = SamplingBatch(requests, 4, CPU)
    places, tokens = batch.choose(logits.clone(), MASK, np.array(masked))
    return dict(zip(places.tolist(), tokens.tolist(), strict=True))


def test_the_mask_token_is_never_chosen_even_as_the_arg_max() -> None:
    logits = torch.zeros(4, 10)
    logits[:, MASK] = 50.0
    logits[2, 3] = 5.0
    assert choose([request()], logits, [0, 1, 2, 3]) == {2: 3}
    for temperature in (0.0, 1.0, 2.0):
        chosen = choose([request(temperature=temperature, confidence_threshold=0.0)], logits, [0, 1, 2, 3])
        assert len(chosen) == 4 and MASK not in chosen.values()


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(1, 10)
    logits[0, [4, 7]] = 3.0
    assert choose([request()], logits, [1]) == {1: 4}


def test_every_request_of_a_mixed_batch_makes_progress() -> None:
    requests = [request(confidence_threshold=1.0), request(unmasking="quota", steps_per_block=2), request(seed=3)]
    logits = torch.randn(9, 10, generator=torch.Generator().manual_seed(0))
    chosen = choose(requests, logits, [0, 1, 3, 4, 5, 6, 7, 9, 10])
    assert [sum(place // 4 == row for place in chosen) for row in range(3)] == [1, 2, 1]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{}, {"unmasking": "quota", "steps_per_block": 2}, {"temperature": 0.7}])
def test_broken_logits_fail_their_own_request_alone(broken: float, options: dict[str, object]) -> None:
    requests = [request(**options), request(**options)]
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    alone = choose(requests[1:], logits[3:], [0, 1, 2])
    logits[1, 5] = broken
    chosen = choose(requests, logits, [0, 1, 2, 4, 5, 6])
    assert FAILED in [token for place, token in chosen.items() if place < 4]
    assert {place - 4: token for place, token in chosen.items() if place >= 4} == alone


def test_a_request_draws_the_same_alone_and_in_a_batch() -> None:
    drawn = request(temperature=1.0, seed=5, confidence_threshold=0.0)
    logits = torch.randn(8, 10, generator=torch.Generator().manual_seed(0))
    others = request(temperature=0.3, seed=6)
    alone = choose([drawn], logits[4:], [0, 1, 2, 3])
    mixed = choose([others, drawn], logits, list(range(8)))
    assert {place - 4: token for place, token in mixed.items() if place >= 4} == alone
    again = choose([request(temperature=1.0, seed=7, confidence_threshold=0.0)], logits[4:], [0, 1, 2, 3])
    assert again != alone
