from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.beyond import __main__, scale
from benchmarks.beyond.ideas import BASELINES, IDEAS, IN_PLACE, MORE_COLOCATED


def test_the_report_has_every_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__main__, "BASELINES", BASELINES[1:2])
    monkeypatch.setattr(__main__, "MORE_COLOCATED", MORE_COLOCATED[:1])
    monkeypatch.setattr(__main__, "IDEAS", IDEAS[:2])
    monkeypatch.setattr(__main__, "IN_PLACE", IN_PLACE[:1])
    monkeypatch.setattr(scale, "SIZES", (8, 16))
    monkeypatch.setattr(scale, "ROUTERS", (2,))
    monkeypatch.setattr(scale, "DURATION_S", 2.0)
    monkeypatch.setattr(scale, "placements", lambda num_workers: dict.fromkeys(scale.routing.REGIMES, 10_000.0))
    arguments = ["--seeds", "1", "--num-requests", "20", "--processes", "1", "--cache", str(tmp_path / "cache")]
    assert __main__.main([*arguments, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    for row in (
        f"| {IDEAS[0].name} |",
        f"| {IN_PLACE[0].name} |",
        "hybrid 5P3C | 16 |",
        "| 2 routers |",
        "| 8 routers |",
        "| nominal | 10,000 |",
    ):
        assert row in text


def test_size_keeps_split_and_load_per_worker() -> None:
    small, large = (scale.run_of(scale.HYBRID, num_workers, 1) for num_workers in (8, 64))
    assert (large.config.num_prefill, large.config.num_colocated) == (40, 24)
    assert len(large.workload.lengths) == pytest.approx(8 * len(small.workload.lengths), rel=0.01)
    assert scale.seeds_of(64, [1, 2]) == [1, 2] and scale.seeds_of(512, [1, 2]) == [1]
