"""Every cache policy, every rule of unmasking, and remasking, as clients ask for them: the engine's own answers."""

from __future__ import annotations

import time
from typing import Any

import pytest

from backend.core.cache_policy import CACHE_POLICIES
from backend.core.sampling_params import UNMASKING
from tests.e2e.questions import RULES, WAYS, Question, mixed
from tests.e2e.reference import BLOCK, Reference
from tests.e2e.served import Served, together, wait_until

pytestmark = pytest.mark.e2e

PROMPT = "count from 5 to 70"
SLOWLY: dict[str, Any] = {"unmasking": "quota", "steps_per_block": BLOCK}

POLICIES: dict[str, dict[str, Any]] = {
    name: {"cache_policy": name, "unmasking": "random", **RULES["random"]} for name in CACHE_POLICIES
}
REFRESHED: dict[str, dict[str, Any]] = {
    "dual, refreshed": {"cache_policy": "dual", "cache_refresh_interval": 4, **SLOWLY},
    "dkv-greedy with a wide window": {**POLICIES["dkv-greedy"], "cache_window": 12, "cache_refresh_interval": 5},
}
REMASKED: dict[str, dict[str, Any]] = {
    "remasked": {"remask_below": 0.03, **SLOWLY},
    "remasked without a cache": {"remask_below": 0.03, "cache_policy": "none", **RULES["threshold"]},
}
CASES = POLICIES | {rule: {"unmasking": rule, **RULES[rule]} for rule in RULES} | REFRESHED | REMASKED
# What computes everything anew in the middle of a block.
REFRESHING = {"none", "dkv-decode", "dkv-greedy", *REFRESHED, "remasked without a cache"}


def test_these_are_all() -> None:
    assert set(CACHE_POLICIES) | set(UNMASKING) <= set(CASES)


@pytest.fixture
def counted(chaotic_graph: Served) -> Served:
    """The graph when all that was asked before is in its totals, which lag a fifth of a second behind."""
    before = -1.0
    while (now := chaotic_graph.total("num_steps_total")) != before:
        before = now
        time.sleep(0.4)
    return chaotic_graph


@pytest.mark.parametrize("case", CASES)
def test_each_alone(counted: Served, chaotic_reference: Reference, case: str) -> None:
    graph, question = counted, Question(PROMPT, 40, CASES[case])
    expected = chaotic_reference.chat(PROMPT, 40, **question.params)
    steps, refreshed = graph.total("num_steps_total"), graph.total("num_refresh_tokens_total")
    for way in WAYS:
        assert way(question, graph)() == expected.text
    # Workers bring their totals up to date several times a second.
    steps += expected.num_steps * len(WAYS)
    wait_until(lambda: graph.total("num_steps_total") >= steps, "all steps to be counted")
    assert graph.total("num_steps_total") == steps
    assert (graph.total("num_refresh_tokens_total") > refreshed) == (case in REFRESHING)


def test_each_makes_a_difference(chaotic_reference: Reference) -> None:
    """Otherwise these tests would not see an option that gets lost."""
    for cases in (POLICIES, RULES):
        answers = {chaotic_reference.chat(PROMPT, 40, **CASES[case]).text for case in cases}
        assert len(answers) == len(cases)
    slow = chaotic_reference.chat(PROMPT, 40, **SLOWLY).text
    assert all(chaotic_reference.chat(PROMPT, 40, **CASES[case]).text != slow for case in REFRESHED | REMASKED)


def test_32_at_once_by_every_way(chaotic_graph: Served, chaotic_reference: Reference) -> None:
    questions = mixed(32)
    expected = [question.expected(chaotic_reference) for question in questions]
    calls = [WAYS[i % len(WAYS)](question, chaotic_graph) for i, question in enumerate(questions)]
    assert together(*calls) == expected


def test_nothing_is_streamed_that_may_still_be_taken_back(chaotic_graph: Served, chaotic_reference: Reference) -> None:
    for params, is_remasked in ((SLOWLY, False), (REMASKED["remasked"], True)):
        question = Question(PROMPT, 96, {"ignore_eos": True, **params})
        answer, num_responses = question.streamed_over_kserve(chaotic_graph)
        assert answer.tokens == chaotic_reference.chat(PROMPT, 96, **question.params).tokens
        assert (num_responses <= 96 // BLOCK) == is_remasked
