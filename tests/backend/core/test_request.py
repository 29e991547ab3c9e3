from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.block import Block, IllegalTransitionError
from backend.core.logprobs import TokenLogprobs
from backend.core.request import Request, RequestStatus
from backend.core.sampling_params import InvalidRequestError, SamplingParams

S = RequestStatus
EOS = 99


def make(max_tokens: int = 8, logprobs: int | None = None, **kwargs: object) -> Request:
    params = SamplingParams(max_tokens, 8, 4, steps_per_block=4, stop_token_ids=(EOS,), logprobs=logprobs)
    return Request("r", (1, 2, 3), params, 0.0, **kwargs)  # type: ignore[arg-type]


def test_the_frontier_follows_what_is_committed_out_of_order() -> None:
    request = make()
    assert not request.commit([(2, 12)])
    assert request.answer() == ([], None)
    assert request.commit([(0, 10)])
    assert request.answer() == ([10], None)
    request.commit([(1, 11), (3, 13)])
    assert request.answer() == ([10, 11, 12, 13], None)
    assert request.answer(3) == ([13], None)
    assert request.block.num_masked == 0


def test_before_min_tokens_a_stop_token_is_a_token_like_others() -> None:
    params = SamplingParams(8, 8, 4, steps_per_block=4, stop_token_ids=(EOS,), min_tokens=2)
    request = Request("r", (1,), params, 0.0)
    request.commit([(0, EOS), (1, 5)])
    assert request.answer() == ([EOS, 5], None)
    assert request.answer(1) == ([5], None)
    request.commit([(2, EOS)])
    assert request.answer() == ([EOS, 5], S.FINISHED_STOP)
    assert request.answer(1) == ([5], S.FINISHED_STOP)


def test_logprobs_are_kept_by_position() -> None:
    first, second, third = (TokenLogprobs(-float(i)) for i in range(3))
    request = make(finished_blocks=[1, 2, 3, 4], prefilled=[(2, 12)], prefilled_logprobs=[third], logprobs=0)
    request.commit([(1, 11), (0, 10)], [second, first])
    assert request.logprobs(4, 3) == (first, second, third)
    assert request.logprobs(5, 1) == (second,)
    assert make().logprobs(0, 0) == ()


def test_a_committed_position_is_final() -> None:
    request = make()
    request.commit([(1, 5)])
    with pytest.raises(IllegalTransitionError):
        request.commit([(1, 5)])


def test_the_answer_ends_at_a_stop_token_once_all_before_it_is_committed() -> None:
    request = make()
    request.commit([(2, EOS), (3, 7)])
    assert request.answer() == ([], None)
    request.commit([(0, 4), (1, 5)])
    assert request.answer() == ([4, 5], S.FINISHED_STOP)


@pytest.mark.parametrize("max_tokens", [1, 3, 4, 5, 8])
def test_max_tokens_is_exact(max_tokens: int) -> None:
    request = make(max_tokens)
    request.transition(S.PREFILLING)
    request.commit([(i, i) for i in range(4)])
    if max_tokens > 4:
        assert request.answer()[1] is None
        request.next_block()
        request.commit([(i, 4 + i) for i in range(4)])
    assert request.answer() == (list(range(max_tokens)), S.FINISHED_LENGTH)


def test_a_stop_token_beyond_max_tokens_does_not_count() -> None:
    request = make(2)
    request.commit([(0, 1), (1, 2), (2, EOS)])
    assert request.answer() == ([1, 2], S.FINISHED_LENGTH)


def test_the_next_block_starts_masked_and_keeps_the_response() -> None:
    request = make()
    request.transition(S.PREFILLING)
    with pytest.raises(IllegalTransitionError, match="still has masks"):
        request.next_block()
    request.commit([(i, i) for i in range(4)])
    request.next_block()
    assert (request.block.index, request.block_start, request.status) == (1, 7, S.WAITING)
    assert request.block.tokens == [None] * 4
    assert request.answer() == ([0, 1, 2, 3], None)


def test_a_retried_block_starts_over_with_a_new_attempt_and_never_contradicts_what_was_streamed() -> None:
    request = make()
    request.transition(S.PREFILLING)
    request.commit([(0, 10), (1, 11), (3, 13)])
    request.retry_block(request.block.committed_prefix())
    assert (request.block.attempt, request.block.num_masked, request.status) == (2, 4, S.WAITING)
    request.commit([(0, 77), (1, 11), (2, 12), (3, 14)])
    assert request.answer() == ([10, 11, 12, 14], None)


def test_partial_blocks_cannot_be_finished_blocks() -> None:
    with pytest.raises(ValueError, match="whole blocks"):
        make(finished_blocks=[1, 2, 3])


@given(st.permutations(range(4)), st.lists(st.integers(0, 99), min_size=4, max_size=4))
def test_any_order_of_commits_gives_the_same_answer(order: list[int], tokens: list[int]) -> None:
    block = Block(0, 4)
    for count, offset in enumerate(order, 1):
        block.commit(offset, tokens[offset])
        done = set(order[:count])
        expected = next((i for i in range(4) if i not in done), 4)
        assert block.frontier == expected
        assert block.committed_prefix() == tokens[:expected]


LEGAL = {
    S.WAITING: {S.PREFILLING},
    S.PREFILLING: {S.WAITING_FOR_KV, S.DENOISING, S.WAITING, S.FINISHED_STOP, S.FINISHED_LENGTH},
    S.WAITING_FOR_KV: {S.TRANSFERRING, S.WAITING},
    S.TRANSFERRING: {S.DENOISING, S.WAITING, S.FINISHED_STOP, S.FINISHED_LENGTH},
    S.DENOISING: {S.WAITING, S.FINISHED_STOP, S.FINISHED_LENGTH},
}


@pytest.mark.parametrize("before", S)
@pytest.mark.parametrize("after", S)
def test_only_the_transitions_of_the_design_are_legal(before: S, after: S) -> None:
    request = make()
    request.status = before
    ends = {S.FINISHED_ABORTED, S.FINISHED_ERROR}
    if after in LEGAL.get(before, set()) or (after in ends and not before.is_finished):
        request.transition(after)
        assert request.status is after
    else:
        with pytest.raises(IllegalTransitionError):
            request.transition(after)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 9), ("block_length", 0), ("block_length", 257), ("canvas_length", 6),
        ("unmasking", "entropyy"), ("confidence_threshold", 1.5), ("confidence_threshold", float("nan")),
        ("steps_per_block", 0), ("steps_per_block", 5), ("temperature", -0.1), ("temperature", float("inf")),
        ("seed", 2**63), ("max_tokens", True), ("block_length", 4.0),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_by_name(field: str, value: object) -> None:
    good: dict[str, object] = {"max_tokens": 8, "canvas_length": 8, "block_length": 4, "steps_per_block": 4}
    with pytest.raises(InvalidRequestError, match=f"^{field}="):
        SamplingParams(**{**good, field: value})  # type: ignore[arg-type]
