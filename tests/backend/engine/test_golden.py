"""Generation against Fast-dLLM's own code: same tokens, same number of forwards."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.core.scheduler import SchedulerConfig
from backend.engine.engine import Engine, EngineConfig
from backend.sampling.unmask import by_factor
from tests.backend.engine.conftest import GoldenTable

Case = dict[str, Any]


@pytest.fixture(scope="module")
def engine(golden: Path) -> Engine:
    model = golden / "models" / "tiny-llada"
    return Engine.from_config(EngineConfig(model, SchedulerConfig(300, 16), kv_cache_tokens=4096))


CACHES = ("none", "prefix", "dual")


@pytest.fixture(scope="module", params=CACHES)
def cases(golden: Path, request: pytest.FixtureRequest) -> list[Case]:
    """One cache policy's cases with confidence threshold or fixed quota."""
    found = [c for c in read(golden, request.param) if c["strategy"]["name"] in ("threshold", "fixed")]
    assert len(found) == {"none": 35, "prefix": 36, "dual": 34}[request.param]
    return found


@pytest.fixture(scope="module", params=CACHES)
def factor_cases(golden: Path, request: pytest.FixtureRequest) -> list[Case]:
    return [case for case in read(golden, request.param) if case["strategy"]["name"] == "factor"]


def read(golden: Path, cache: str) -> list[Case]:
    everything = json.loads((golden / "dev" / "gen_llada.json").read_text())["cases"]
    return [case for case in everything if case["cache"] == cache]


def params(case: Case) -> SamplingParams:
    strategy = case["strategy"]
    num_blocks = case["gen_length"] // case["block_length"]
    return SamplingParams(
        max_tokens=case["gen_length"],
        canvas_length=case["gen_length"],
        block_length=case["block_length"],
        unmasking="quota" if strategy["name"] == "fixed" else strategy["name"],
        confidence_threshold=strategy.get("threshold", 0.9),
        factor=strategy.get("factor", 1.0),
        steps_per_block=min(case["steps"] // num_blocks, case["block_length"]),
        cache_policy=case["cache"],
    )


def generate(
    engine: Engine, cases: list[Case], committed: dict[str, dict[int, int]] | None = None
) -> tuple[dict[str, list[int]], Counter[str]]:
    """Tokens and number of forwards of each case, all in flight together.

    `committed` is filled with the forward (from 0) that committed each position of each answer.
    """
    for i, case in enumerate(cases):
        engine.scheduler.add(Request(case["id"], case["prompt"], params(case), float(i)))
    answers: dict[str, list[int]] = {}
    forwards: Counter[str] = Counter()
    while engine.scheduler.has_work:
        output = engine.step()
        assert output is not None
        engine.scheduler.pool.check()
        for request in (*output.plan.prefills, *output.plan.decodes):
            for offset, token in enumerate(request.block.tokens):
                if committed is not None and token is not None:
                    committed[request.request_id].setdefault(
                        len(request.response) + offset, forwards[request.request_id]
                    )
            forwards[request.request_id] += 1
        for request in output.left:
            if request.status.is_finished:
                answers[request.request_id] = [*request.prompt, *request.answer()[0]]
            else:
                request.next_block()
                engine.scheduler.add(request)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages
    return answers, forwards


def compare(
    table: GoldenTable,
    cases: list[Case],
    answers: dict[str, list[int]],
    forwards: Counter[str],
    remark: str = "",
) -> None:
    """Asserts that all cases came out as the reference code's."""
    for case in cases:
        name, strategy = case["id"], case["strategy"]
        rule, number = (strategy.get(key, "") for key in ("name", "threshold"))
        table.compare(
            case["model"], case["cache"], f"{rule or strategy['alg']} {number or strategy.get('factor', '')}", remark,
            tokens=answers[name] == case["tokens"], forwards=forwards[name] == case["nfe"], case=name,
        )  # fmt: skip


def batches(cases: list[Case], is_together: bool) -> list[list[Case]]:
    """All in one batch, or every third one alone."""
    return [cases] if is_together else [[case] for case in cases[::3]]


@pytest.mark.parametrize("is_together", [False, True])
def test_the_reference_cases(engine: Engine, cases: list[Case], is_together: bool, golden_table: GoldenTable) -> None:
    for together in batches(cases, is_together):
        compare(golden_table, together, *generate(engine, together), "in one batch" if is_together else "alone")


def by_factor_as_the_reference(score: NDArray[np.float32], factor: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Its quirk included, which we do not copy: the last candidate is taken though it fails."""
    chosen = by_factor(score, factor)
    candidates = score > -np.inf
    one_left = candidates.sum(axis=1) - chosen.sum(axis=1) == 1
    chosen[one_left] = candidates[one_left]
    return chosen


@pytest.mark.parametrize("is_together", [False, True])
def test_the_factor_cases_as_the_reference_counts(
    engine: Engine,
    factor_cases: list[Case],
    is_together: bool,
    monkeypatch: pytest.MonkeyPatch,
    golden_table: GoldenTable,
) -> None:
    monkeypatch.setattr("backend.sampling.sampler.by_factor", by_factor_as_the_reference)
    assert len(factor_cases) == 13
    for cases in batches(factor_cases, is_together):
        committed: dict[str, dict[int, int]] = defaultdict(dict)
        answers, forwards = generate(engine, cases, committed)
        where = "in one batch" if is_together else "alone"
        compare(golden_table, cases, answers, forwards, f"{where}; with the reference's quirk")
        for case in cases:
            assert [committed[case["id"]][i] for i in range(case["gen_length"])] == case["commit_forward"]


def test_the_factor_cases_up_to_the_first_candidate_that_the_reference_takes_too_many(
    engine: Engine, factor_cases: list[Case]
) -> None:
    """From there on the answers are different questions' answers."""
    for case in factor_cases:
        committed: dict[str, dict[int, int]] = defaultdict(dict)
        answers, _ = generate(engine, [case], committed)
        if not case["factor_tail_forwards"]:
            assert answers[case["id"]] == case["tokens"], case["id"]
            continue
        ours, tail = committed[case["id"]], case["factor_tail_forwards"][0]
        theirs = {i: forward for i, forward in enumerate(case["commit_forward"]) if forward <= tail}
        late = [i for i, forward in theirs.items() if ours[i] != forward]
        assert len(late) == 1 and theirs[late[0]] == tail and ours[late[0]] == tail + 1, case["id"]
        tokens = answers[case["id"]][case["prompt_length"] :]
        assert all(tokens[i] == case["tokens"][case["prompt_length"] + i] for i in theirs if i not in late), case["id"]
