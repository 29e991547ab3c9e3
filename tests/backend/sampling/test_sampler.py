from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.core.request import Request
from backend.core.sampling_params import UNMASKING, SamplingParams
from backend.sampling.sampler import FAILED, SamplingBatch

MASK = 9
CPU = torch.device("cpu")


def request(**options: object) -> Request:
    given = {"max_tokens": 4, "canvas_length": 4, "block_length": 4, "steps_per_block": 4, **options}
    return Request("r", [1], SamplingParams(**given), 0.0)  # type: ignore[arg-type]


def choose(requests: list[Request], logits: torch.Tensor, masked: list[int]) -> dict[int, int]:
    choice = SamplingBatch(requests, 4, CPU).choose(logits.clone(), MASK, np.array(masked))
    return dict(zip(choice.places.tolist(), choice.tokens.tolist(), strict=True))


def test_the_mask_token_is_never_chosen_even_as_the_arg_max() -> None:
    logits = torch.zeros(4, 10)
    logits[:, MASK] = 50.0
    logits[2, 3] = 5.0
    assert choose([request()], logits, [0, 1, 2, 3]) == {2: 3}
    for unmasking in UNMASKING:
        for temperature in (0.0, 1.0, 2.0):
            everything = request(
                unmasking=unmasking, temperature=temperature, confidence_threshold=0.0, factor=9.0, steps_per_block=1
            )
            chosen = choose([everything], logits, [0, 1, 2, 3])
            assert len(chosen) == 4 and MASK not in chosen.values()


def test_tokens_that_an_earlier_attempt_streamed_stand_and_are_what_logprobs_are_of() -> None:
    again = request(confidence_threshold=0.0, logprobs=1)
    again.block.known = (3, 4)
    logits = torch.randn(7, 10, generator=torch.Generator().manual_seed(0))
    batch = SamplingBatch([request(confidence_threshold=0.0), again], 4, CPU)
    choice = batch.choose(logits.clone(), MASK, np.array([0, 1, 2, 4, 5, 6, 7]))
    logits[:, MASK] = -torch.inf
    best = logits.argmax(dim=-1).tolist()
    assert best[3] != 3 and best[4] != 4
    assert choice.tokens.tolist() == [*best[:3], 3, 4, *best[5:]]
    told = batch.logprobs(choice)["r"]
    expected = logits[3:].log_softmax(dim=-1)[range(4), [3, 4, *best[5:]]].tolist()
    assert [of.logprob for of in told] == pytest.approx(expected, abs=1e-5)
    broken = torch.full((1, 10), torch.nan)
    assert SamplingBatch([again], 4, CPU).choose(broken, MASK, np.array([1])).tokens.tolist() == [FAILED]


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
@pytest.mark.parametrize("unmasking", UNMASKING)
@pytest.mark.parametrize("options", [{}, {"steps_per_block": 2}, {"temperature": 0.7, "top_p": 0.9}])
def test_broken_logits_fail_their_own_request_alone(broken: float, options: dict[str, object], unmasking: str) -> None:
    requests = [request(unmasking=unmasking, **options), request(unmasking=unmasking, **options)]
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    alone = choose(requests[1:], logits[3:], [0, 1, 2])
    logits[1, 5] = broken
    chosen = choose(requests, logits, [0, 1, 2, 4, 5, 6])
    assert FAILED in [token for place, token in chosen.items() if place < 4]
    assert {place - 4: token for place, token in chosen.items() if place >= 4} == alone


def test_a_step_whose_quota_is_nothing_tells_of_broken_logits() -> None:
    waits = request(unmasking="entropy", quota_schedule="timesteps")
    assert choose([waits], torch.zeros(4, 10), [0, 1, 2, 3]) == {}
    logits = torch.zeros(4, 10)
    logits[2] = torch.nan
    assert choose([waits], logits, [0, 1, 2, 3]) == {2: FAILED}


def test_a_request_draws_the_same_alone_and_in_a_batch() -> None:
    drawn = request(temperature=1.0, seed=5, confidence_threshold=0.0)
    logits = torch.randn(8, 10, generator=torch.Generator().manual_seed(0))
    others = request(temperature=0.3, seed=6)
    alone = choose([drawn], logits[4:], [0, 1, 2, 3])
    mixed = choose([others, drawn], logits, list(range(8)))
    assert {place - 4: token for place, token in mixed.items() if place >= 4} == alone
    again = choose([request(temperature=1.0, seed=7, confidence_threshold=0.0)], logits[4:], [0, 1, 2, 3])
    assert again != alone


def scores(unmasking: str, rows: list[list[float]]) -> list[float]:
    """How good each position is, one after the other, in Python's own arithmetic."""
    judged = []
    for row in rows:
        row = [value for token, value in enumerate(row) if token != MASK]
        total = sum(math.exp(value) for value in row)
        shares = sorted((math.exp(value) / total for value in row), reverse=True)
        entropy = -sum(share * math.log(share) for share in shares)
        judged.append({"entropy": -entropy, "margin": shares[0] - shares[1]}.get(unmasking, shares[0]))
    return judged


# Multiples of a quarter: equal rows give equal scores, others differ by far more than rounding does.
ROWS = st.lists(st.lists(st.integers(-8, 16).map(lambda n: n / 4), min_size=10, max_size=10), min_size=4, max_size=4)


@given(ROWS, st.sampled_from(["quota", "entropy", "margin", "maskgit_plus"]), st.sampled_from([1, 2, 4]), st.data())
def test_the_best_positions_by_every_measure(
    rows: list[list[float]], unmasking: str, count: int, data: st.DataObject
) -> None:
    masked = sorted(data.draw(st.sets(st.integers(0, 3), min_size=1)))
    judged = dict(zip(masked, (round(score, 5) for score in scores(unmasking, [rows[i] for i in masked])), strict=True))
    asked = request(unmasking=unmasking, steps_per_block=4 // count)
    chosen = choose([asked], torch.tensor([rows[i] for i in masked]), masked)
    assert sorted(judged[place] for place in chosen) == sorted(judged.values())[-count:]
    for place, token in chosen.items():
        assert token == min((t for t in range(10) if t != MASK), key=lambda t: (-rows[place][t], t))


def test_equal_positions_go_from_left_to_right() -> None:
    for unmasking in ("quota", "entropy", "margin", "maskgit_plus"):
        chosen = choose([request(unmasking=unmasking, steps_per_block=2)], torch.zeros(3, 10), [1, 2, 3])
        assert list(chosen) == [1, 2]


def test_the_factor_counts_from_the_best_one() -> None:
    logits = torch.full((4, 10), -20.0)
    for position, share in enumerate((0.7, 0.95, 0.3, 0.7)):
        logits[position, 4] = math.log(share)
        logits[position, 5:9] = math.log((1 - share) / 4)
    assert list(choose([request(unmasking="factor", factor=1.0)], logits, [0, 1, 2, 3])) == [0, 1]
    assert list(choose([request(unmasking="factor", factor=1.3)], logits, [0, 1, 2, 3])) == [0, 1, 3]
    assert list(choose([request(unmasking="factor", factor=0.5)], logits, [0, 1, 2, 3])) == [1]


def test_before_min_tokens_no_stop_token_is_a_candidate() -> None:
    """Two requests with stop tokens of their own, the second in its second block; and one that does not mind."""
    logits = torch.zeros(12, 10)
    logits[:, 3], logits[:, 5] = 9.0, 8.0
    options = {"max_tokens": 8, "canvas_length": 8, "confidence_threshold": 0.0}
    first = request(stop_token_ids=(3, 5), min_tokens=2, **options)
    second = Request("s", [1], replace(first.params, stop_token_ids=(3,), min_tokens=5), 0.0, finished_blocks=[7] * 4)
    third = request(stop_token_ids=(3,), **options)
    chosen = choose([first, second, third], logits, list(range(12)))
    assert [chosen[place] for place in range(12)] == [0, 0, 3, 3, 5, 3, 3, 3, 3, 3, 3, 3]
    alone = choose([request(stop_token_ids=(3, 5), min_tokens=4, temperature=1.0, **options)], logits[:4], [0, 1, 2, 3])
    assert not {3, 5} & set(alone.values())


def test_logprobs_are_told_to_those_who_ask() -> None:
    asks, asks_more, does_not = request(logprobs=1), request(logprobs=3), request()
    for one, name in ((asks, "a"), (asks_more, "b"), (does_not, "c")):
        one.request_id = name
    logits = torch.randn(12, 10, generator=torch.Generator().manual_seed(0))
    batch = SamplingBatch([asks, does_not, asks_more], 4, CPU)
    choice = batch.choose(logits.clone(), MASK, np.arange(12))
    told = batch.logprobs(choice)
    assert {name: [len(of.top) for of in many] for name, many in told.items()} == {"a": [1], "b": [3]}
    logits[:, MASK] = -torch.inf
    exact = logits.log_softmax(-1)
    for name, index in (("a", 0), ("b", 2)):
        place, token = choice.places[index], choice.tokens[index]
        assert told[name][0].logprob == pytest.approx(exact[place, token].item(), abs=1e-5)
        assert told[name][0].top[0] == (token, told[name][0].logprob)
    assert SamplingBatch([does_not], 4, CPU).logprobs(choice) == {}


def test_random_takes_every_position_and_keeps_to_the_seed() -> None:
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    first = [next(iter(choose([request(unmasking="random", seed=s)], logits, [0, 1, 2, 3]))) for s in range(400)]
    again = [next(iter(choose([request(unmasking="random", seed=s)], logits, [0, 1, 2, 3]))) for s in range(400)]
    assert first == again
    assert all(70 < first.count(place) < 130 for place in range(4))


def test_temperature_0_is_arg_max_whatever_else_is_asked() -> None:
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    for unmasking in UNMASKING:
        plain = choose([request(unmasking=unmasking)], logits, [0, 1, 2, 3])
        asked = request(unmasking=unmasking, top_p=0.1, top_k=3, min_p=0.9)
        assert choose([asked], logits, [0, 1, 2, 3]) == plain


def test_what_a_request_asks_is_what_is_drawn_from() -> None:
    """Pearson's chi-square over 3,000 seeds in one batch; 13.8 is the 0.1% point of 2 degrees of freedom."""
    n = 3000
    row = [0.0, 1.0, -1.0, 1.5, 0.5, 2.0, -9.0, 1.2, 0.0, 9.0]
    requests = [request(seed=seed, temperature=1.5, top_k=4, top_p=0.9, min_p=0.55) for seed in range(n)]
    chosen = choose(requests, torch.tensor([row] * n), list(range(0, 4 * n, 4)))
    counts = [list(chosen.values()).count(token) for token in range(10)]
    # Of the best four (the mask is none) the fourth is 0.51 times as likely as the first.
    weights = {token: math.exp(row[token] / 1.5) for token in (5, 3, 7)}
    expected = {token: n * weight / sum(weights.values()) for token, weight in weights.items()}
    assert sum(counts) == sum(counts[token] for token in expected) == n
    assert sum((counts[token] - e) ** 2 / e for token, e in expected.items()) < 13.8


def test_maskgit_plus_ranks_by_the_chance_that_the_token_had_and_quota_by_the_plain_one() -> None:
    """With top-k 1 every token is drawn with certainty, so the leftmost comes first."""
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    logits[2, 1] = 9.0
    options = {"temperature": 1.0, "top_k": 1}
    assert list(choose([request(unmasking="maskgit_plus", **options)], logits, [0, 1, 2, 3])) == [0]
    assert list(choose([request(unmasking="quota", **options)], logits, [0, 1, 2, 3])) == [2]


def test_32_mixed_requests_each_equal_themselves_alone() -> None:
    rng = random.Random(3)
    requests = [
        request(
            unmasking=UNMASKING[i % len(UNMASKING)],
            quota_schedule=rng.choice(("even", "timesteps")),
            steps_per_block=rng.randint(1, 4),
            confidence_threshold=rng.choice((0.1, 0.3, 0.9)),
            factor=rng.choice((0.5, 1.0, 2.0)),
            temperature=rng.choice((0.0, 0.6, 1.2)),
            top_k=rng.choice((0, 1, 4)),
            top_p=rng.choice((0.5, 0.9, 1.0)),
            min_p=rng.choice((0.0, 0.2)),
            seed=rng.randint(-9, 9),
        )
        for i in range(32)
    ]
    masked = [i * 4 + offset for i in range(32) for offset in sorted(rng.sample(range(4), rng.randint(1, 4)))]
    logits = torch.randn(len(masked), 10, generator=torch.Generator().manual_seed(0)) * 2
    together = choose(requests, logits, masked)
    for i, one in enumerate(requests):
        rows = [row for row, place in enumerate(masked) if place // 4 == i]
        alone = choose([one], logits[rows], [masked[row] - 4 * i for row in rows])
        assert alone == {place - 4 * i: token for place, token in together.items() if place // 4 == i}
        assert alone or one.params.quota_schedule == "timesteps"
