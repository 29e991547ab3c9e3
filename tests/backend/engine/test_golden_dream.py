"""Dream's generation against Fast-dLLM's own code: same tokens, same forwards, same commits in each."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from backend.core.sampling_params import SamplingParams
from backend.core.scheduler import SchedulerConfig
from backend.core.step import StepPlan, StepResult
from backend.engine.engine import Engine, EngineConfig
from tests.backend.engine import test_golden
from tests.backend.engine.conftest import GoldenTable
from tests.backend.engine.test_golden import Case, batches, compare, generate


@pytest.fixture(scope="module")
def engine(golden: Path) -> Engine:
    model = golden / "models" / "tiny-dream"
    return Engine.from_config(EngineConfig(model, SchedulerConfig(300, 16), kv_cache_tokens=4096))


CASES = {
    ("dual", "confidence_threshold"): 13,
    ("dual", "entropy"): 18,
    ("prefix", "confidence_threshold"): 13,
    ("prefix", "entropy"): 19,
    ("none", "confidence_threshold"): 5,
    ("none", "entropy"): 6,
    ("none", "topk_margin"): 6,
    ("none", "maskgit_plus"): 5,
}


@pytest.fixture(scope="module", params=list(CASES), ids="-".join)
def cases(golden: Path, request: pytest.FixtureRequest) -> list[Case]:
    """The cases of one cache policy and strategy."""
    cache, strategy = request.param
    file = "gen_dream_nocache.json" if cache == "none" else "gen_dream_block.json"
    everything = json.loads((golden / "dev" / file).read_text())["cases"]
    found = [c for c in everything if c["cache"] == cache and c["strategy"]["alg"] == strategy]
    assert len(found) == CASES[cache, strategy]
    return found


RULES = {"entropy": "entropy", "topk_margin": "margin", "maskgit_plus": "maskgit_plus"}


def params(case: Case) -> SamplingParams:
    num_blocks = case["gen_length"] // case["block_length"]
    return SamplingParams(
        max_tokens=case["gen_length"],
        canvas_length=case["gen_length"],
        block_length=case["block_length"],
        unmasking=RULES.get(case["strategy"]["alg"], "paced_threshold" if case["cache"] == "none" else "threshold"),
        confidence_threshold=case["strategy"].get("threshold", 0.9),
        quota_schedule="timesteps",
        steps_per_block=case["steps"] // num_blocks,
        cache_policy=case["cache"],
    )


@pytest.fixture
def commits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """How many tokens each forward of each case commits; `generate` asks for `params`."""
    counted: dict[str, list[int]] = defaultdict(list)
    run = engine.runner.run

    def counting(plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepResult:
        result = run(plan, on_layer)
        for request, committed in zip((*plan.prefills, *plan.decodes), result.commits, strict=True):
            counted[request.request_id].append(len(committed))
        return result

    monkeypatch.setattr(engine.runner, "run", counting)
    monkeypatch.setattr(test_golden, "params", params)
    return counted


@pytest.mark.parametrize("is_together", [False, True])
def test_the_reference_cases(
    engine: Engine, cases: list[Case], commits: dict[str, list[int]], is_together: bool, golden_table: GoldenTable
) -> None:
    for together in batches(cases, is_together):
        compare(golden_table, together, *generate(engine, together), "in one batch" if is_together else "alone")
        for case in together:
            assert commits[case["id"]] == [forward[4] for forward in case["forwards"]], case["id"]
