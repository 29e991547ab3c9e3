from __future__ import annotations

import csv
from pathlib import Path

import pytest

from backend.core.scheduler import SchedulerConfig
from backend.engine.engine import Engine, EngineConfig
from benchmarks.quality import RULES, Cell, combinations, measure, report, write_csv
from benchmarks.quality_plot import trade_off
from components.config import DEMO_MODELS


def test_every_policy_meets_every_rule_that_it_allows() -> None:
    pairs = [(policy, rule) for policy, rule, _ in combinations()]
    assert len(pairs) == len(set(pairs)) == 5 * len(RULES) + 1
    assert [rule for policy, rule in pairs if policy == "dkv-greedy"] == ["random, 4 steps"]


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    engine = Engine.from_config(EngineConfig(DEMO_MODELS["demo"], SchedulerConfig(8192, 64)))
    wanted = [c for c in combinations() if c[0] in ("none", "dual") and c[1] in ("threshold 0.9", "random, 4 steps")]
    return [measure(engine, "demo", *one, each=1) for one in wanted]


def test_a_cache_computes_less_and_fewer_steps_return_more_tokens_each(cells: list[Cell]) -> None:
    none, none_random, dual, dual_random = cells
    assert none.overall >= 5 / 6, "the demonstration model knows its tasks"
    assert dual_random.positions_per_token < none_random.positions_per_token
    assert dual.tokens_per_forward > dual_random.tokens_per_forward > 1


def test_the_report_the_table_and_the_plot(cells: list[Cell], tmp_path: Path) -> None:
    text = report(cells, 1)
    assert "## demo" in text and f"{100 * cells[0].overall:.0f}" in text
    write_csv(cells, tmp_path / "cells.csv")
    rows = list(csv.DictReader((tmp_path / "cells.csv").read_text().splitlines()))
    assert [row["cache_policy"] for row in rows] == ["none", "none", "dual", "dual"]
    trade_off(cells, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
