"""What each policy queries, written down by hand and against the plainest way to say it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.cache_policy import CACHE_POLICIES
from backend.core.queries import commits_only_first, is_steady, is_whole, num_query_tokens, query
from backend.core.request import Request
from backend.core.sampling_params import InvalidRequestError, SamplingParams
from backend.core.unmask_schedule import random_picks


def after(
    steps: list[list[int]], policy: str, *, prompt: int = 5, blocks: int = 2, done: int = 0, **options: object
) -> Request:
    """A request in blocks of 4 whose steps so far have committed these offsets."""
    unmasking = "random" if policy == "dkv-greedy" else "quota"
    params = SamplingParams(
        4 * blocks, 4 * blocks, 4, unmasking=unmasking, steps_per_block=4, cache_policy=policy, **options
    )  # type: ignore[arg-type]
    request = Request("a", [0] * prompt, params, 0.0, finished_blocks=[1] * done)
    for offsets in steps:
        request.commit([(offset, 7) for offset in offsets])
    return request


@pytest.mark.parametrize("shift", [0, 1])
def test_fast_dllm_queries_the_block_or_all_from_it(shift: int) -> None:
    for policy, end in (("dual", 9), ("prefix", 13)):
        request = after([[0]], policy)
        assert not is_whole(request, shift) and is_steady(request)
        assert query(request, shift) == [(5, end)]
        assert is_whole(after([], policy), shift)
    assert query(after([[2]], "dual"), 1) == [(4, 9)], "the first position is predicted by the row before it"


def test_only_the_prefill_of_a_shifted_model_commits_the_first_position_alone() -> None:
    assert [commits_only_first(after([], policy), 1) for policy in ("dual", "prefix", "none", "dkv-decode")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert not commits_only_first(after([[0]], "dual"), 1) and not commits_only_first(after([], "dual"), 0)


def test_without_a_cache_every_step_is_whole() -> None:
    assert all(is_whole(after([[0]] * n, "none"), 0) for n in range(1))
    assert is_whole(after([[0], [1], [2]], "none"), 0)
    assert num_query_tokens(after([[0]], "none"), 0) == 13


def test_the_prompt_alone_is_cached() -> None:
    assert query(after([[0]], "dkv-prefill"), 0) == [(5, 13)]
    assert query(after([[0]], "dkv-prefill"), 1) == [(4, 13)], "the prompt's last row predicts the canvas' first"


def test_a_token_is_cached_one_step_after_its_commit() -> None:
    assert is_whole(after([[2]], "dkv-decode"), 0), "dKV-Cache's code for LLaDA caches from its second step on"
    assert not is_whole(after([[2]], "dkv-decode"), 1)
    assert query(after([[2], [0]], "dkv-decode"), 0) == [(5, 7), (8, 13)]
    assert query(after([[2], [0], [3]], "dkv-decode"), 0) == [(6, 7), (8, 13)]
    assert query(after([[2], [0]], "dkv-decode"), 1) == [(4, 13)], "row 7 predicts 8, still to be decided"
    assert query(after([[0, 1, 2], [], [3]], "dkv-decode"), 1) == [(7, 13)]


def test_in_the_last_block_nothing_comes_after() -> None:
    request = after([[0, 1, 2, 3], [], []], "dkv-decode", blocks=1)
    assert query(request, 0) == query(request, 1) == []


@pytest.mark.parametrize(("policy", "interval", "whole"), [
    ("dual", None, {0}), ("dual", 2, {0, 2, 4, 6}), ("dkv-decode", 3, {0, 1, 3, 6}),
    ("dkv-decode", 0, {0, 1}), ("dkv-greedy", None, {0, 2, 4, 6}), ("dkv-prefill", None, {0}),
])  # fmt: skip
def test_refreshes(policy: str, interval: int | None, whole: set[int]) -> None:
    steps = [after([[]] * n, policy, cache_refresh_interval=interval) for n in range(8)]
    assert {n for n, request in enumerate(steps) if is_whole(request, 0)} == whole
    assert is_steady(steps[0]) == (policy == "dual" and not interval)


@given(st.integers(0, 99), st.integers(0, 6), st.integers(0, 1), st.integers(0, 4))
def test_greedy_queries_what_was_and_what_will_be_committed_and_its_neighbours(
    seed: int, window: int, shift: int, done: int
) -> None:
    request = after([], "dkv-greedy", blocks=5, done=4 * done, seed=seed, cache_window=window)
    first = random_picks(request.block, request.params)
    request.commit([(offset, 7) for offset in first])
    (pick,) = random_picks(request.block, request.params)
    start = request.block_start
    wanted = {start + offset for offset in first}
    wanted |= set(range(start + pick - (window + 1) // 2, start + pick + window // 2 + 1))
    wanted |= {start + pick - shift}
    ranges = query(request, shift)
    assert {p for a, b in ranges for p in range(a, b)} == {p for p in wanted if 0 <= p < 25}
    assert all(a < b for a, b in ranges) and all(b < a for (_, b), (a, _) in zip(ranges, ranges[1:], strict=False))


def test_greedy_has_to_know_what_a_step_will_commit() -> None:
    with pytest.raises(InvalidRequestError, match="unmasking='threshold' cannot tell; allowed: random"):
        SamplingParams(4, 4, 4, steps_per_block=4, cache_policy="dkv-greedy")


def test_the_policies() -> None:
    assert set(CACHE_POLICIES) == {"none", "prefix", "dual", "dkv-decode", "dkv-prefill", "dkv-greedy"}
