"""Generation against Fast-dLLM's own code: same tokens, same number of forwards."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.core.scheduler import SchedulerConfig
from backend.engine.engine import Engine, EngineConfig

Case = dict[str, Any]


@pytest.fixture(scope="module")
def engine(golden: Path) -> Engine:
    model = golden / "models" / "tiny-llada"
    return Engine.from_config(EngineConfig(model, SchedulerConfig(300, 16), kv_cache_tokens=4096))


@pytest.fixture(scope="module")
def cases(golden: Path) -> list[Case]:
    """The dual-cache cases with confidence threshold or fixed quota."""
    everything = json.loads((golden / "dev" / "gen_llada.json").read_text())["cases"]
    return [c for c in everything if c["cache"] == "dual" and c["strategy"]["name"] in ("threshold", "fixed")]


def params(case: Case) -> SamplingParams:
    is_threshold = case["strategy"]["name"] == "threshold"
    num_blocks = case["gen_length"] // case["block_length"]
    return SamplingParams(
        max_tokens=case["gen_length"],
        canvas_length=case["gen_length"],
        block_length=case["block_length"],
        unmasking="threshold" if is_threshold else "quota",
        confidence_threshold=case["strategy"]["threshold"] if is_threshold else 0.9,
        steps_per_block=min(case["steps"] // num_blocks, case["block_length"]),
    )


def generate(engine: Engine, cases: list[Case]) -> tuple[dict[str, list[int]], Counter[str]]:
    """Tokens and number of forwards of each case, all in flight together."""
    for i, case in enumerate(cases):
        engine.scheduler.add(Request(case["id"], case["prompt"], params(case), float(i)))
    answers: dict[str, list[int]] = {}
    forwards: Counter[str] = Counter()
    while engine.scheduler.has_work:
        output = engine.step()
        assert output is not None
        engine.scheduler.pool.check()
        forwards.update(request.request_id for request in (*output.plan.prefills, *output.plan.decodes))
        for request in output.left:
            if request.status.is_finished:
                answers[request.request_id] = [*request.prompt, *request.answer()[0]]
            else:
                request.next_block()
                engine.scheduler.add(request)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages
    return answers, forwards


def test_each_case_alone(engine: Engine, cases: list[Case]) -> None:
    assert len(cases) == 34
    for case in cases:
        answers, forwards = generate(engine, [case])
        assert answers[case["id"]] == case["tokens"], case["id"]
        assert forwards[case["id"]] == case["nfe"], case["id"]


def test_all_cases_in_one_batch(engine: Engine, cases: list[Case]) -> None:
    answers, forwards = generate(engine, cases)
    for case in cases:
        assert answers[case["id"]] == case["tokens"], case["id"]
        assert forwards[case["id"]] == case["nfe"], case["id"]
