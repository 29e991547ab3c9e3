from __future__ import annotations

import math

import pytest
import torch

from backend.sampling.logprobs import LOWEST, token_logprobs

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 3.0, -torch.inf], [2.0, 0.0, 0.0, 0.0, 0.0]])


def test_a_token_and_the_likeliest_ones_the_lower_id_first_among_equals() -> None:
    first, second = token_logprobs(LOGITS, torch.tensor([2, 0]), 3)
    exact = LOGITS.double().log_softmax(-1)
    assert first.logprob == pytest.approx(exact[0, 2].item(), abs=1e-5)
    assert [token for token, _ in first.top] == [1, 3, 2]
    assert [logprob for _, logprob in first.top] == pytest.approx(exact[0, [1, 3, 2]].tolist(), abs=1e-5)
    assert [token for token, _ in second.top] == [0, 1, 2]


def test_what_cannot_be_is_a_number_all_the_same() -> None:
    (alone,) = token_logprobs(LOGITS[:1], torch.tensor([4]), 9)
    assert alone.logprob == LOWEST and alone.top[-1] == (4, LOWEST) and len(alone.top) == 5
    assert all(math.isfinite(logprob) for _, logprob in alone.top)


def test_no_others_are_told_if_none_are_asked_for() -> None:
    assert [of.top for of in token_logprobs(LOGITS, torch.tensor([1, 1]), 0)] == [(), ()]
