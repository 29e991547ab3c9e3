"""dKV-Cache against its own code: same tokens, same forwards, the same positions queried in each."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from backend.core.queries import query
from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.core.scheduler import SchedulerConfig
from backend.core.step import StepPlan, StepResult
from backend.engine.engine import Engine, EngineConfig
from tests.backend.engine import test_golden
from tests.backend.engine.conftest import GoldenTable
from tests.backend.engine.test_golden import Case, compare, generate
from tests.backend.engine.test_golden_dream import RULES

Forward = list[list[int]]


@pytest.fixture(scope="module", params=["llada", "dream"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def engine(golden: Path, family: str) -> Engine:
    model = golden / "models" / f"tiny-{family}"
    return Engine.from_config(EngineConfig(model, SchedulerConfig(300, 16), kv_cache_tokens=4096))


@pytest.fixture(scope="module")
def cases(golden: Path, family: str) -> list[Case]:
    found: list[Case] = json.loads((golden / "dev" / f"dkv_{family}.json").read_text())["cases"]
    assert len(found) == 8
    return found


def params(case: Case) -> SamplingParams:
    strategy = case["strategy"]
    is_dream = case["model"] == "tiny-dream"
    num_blocks = case["gen_length"] // case["block_length"]
    return SamplingParams(
        max_tokens=case["gen_length"],
        canvas_length=case["gen_length"],
        block_length=case["block_length"],
        unmasking=RULES[strategy["alg"]] if is_dream else "quota",
        quota_schedule="timesteps" if is_dream else "even",
        steps_per_block=case["steps"] // num_blocks,
        cache_policy="dkv-prefill" if strategy.get("cache_type") == "prefill" else "dkv-decode",
        cache_refresh_interval=strategy["cache_steps"] if is_dream else strategy["cache_reloading_step"],
    )


def as_the_reference_shifts(request: Request, logits_shift: int) -> list[tuple[int, int]]:
    """Its `un`, which we do not copy: a position is cached once the next one is decided, itself or not.

    The one after the last is the first, which is decided.
    """
    if request.params.cache_policy != "dkv-decode":
        return query(request, logits_shift)
    steps = request.block.commit_steps
    start, end = request.block_start, request.sequence_length
    decided = [True] * start + [at is not None and at < request.block.step - 1 for at in steps]
    decided += [False] * (end - len(decided)) + [True]
    open_ = [p for p in range(end) if not decided[p + 1]]
    return [(p, p + 1) for p in open_]


@pytest.fixture
def forwards(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Forward]]:
    """The positions that each forward of each case queries."""
    seen: dict[str, list[Forward]] = defaultdict(list)
    run = engine.runner.run

    def watching(plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepResult:
        for request in plan.prefills:
            seen[request.request_id].append([[0, request.sequence_length]])
        for request in plan.decodes:
            shift = engine.runner.model.config.logits_shift
            seen[request.request_id].append([list(positions) for positions in query(request, shift)])
        return run(plan, on_layer)

    monkeypatch.setattr(engine.runner, "run", watching)
    monkeypatch.setattr(test_golden, "params", params)
    return seen


def has_quirk(case: Case) -> bool:
    return bool(case["strategy"].get("shift_type") == "un" and case["strategy"]["cache_type"] == "decoded")


@pytest.mark.parametrize("is_together", [False, True])
def test_the_reference_cases(
    engine: Engine,
    cases: list[Case],
    forwards: dict[str, list[Forward]],
    is_together: bool,
    golden_table: GoldenTable,
) -> None:
    ours = [case for case in cases if not has_quirk(case)]
    assert len(ours) >= 4
    for together in [ours] if is_together else [[case] for case in ours]:
        compare(golden_table, together, *generate(engine, together), "in one batch" if is_together else "alone")
        for case in together:
            assert forwards[case["id"]] == [ranges for *_, ranges in case["forwards"]], case["id"]


def test_the_others_with_the_quirk_that_we_do_not_copy(
    engine: Engine, cases: list[Case], monkeypatch: pytest.MonkeyPatch, golden_table: GoldenTable
) -> None:
    monkeypatch.setattr(test_golden, "params", params)
    for module in ("backend.engine.block_state.query", "backend.core.queries.query"):
        monkeypatch.setattr(module, as_the_reference_shifts)
    for case in filter(has_quirk, cases):
        compare(golden_table, [case], *generate(engine, [case]), "alone; with the reference's quirk")
