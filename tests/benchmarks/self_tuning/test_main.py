from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.self_tuning import __main__, cases


def test_the_report_has_a_row_per_load_and_per_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {
        name: dataclasses.replace(comparison, cases=comparison.cases[:1], fixed=comparison.fixed[-2:])
        for name, comparison in cases.COMPARISONS.items()
    }
    monkeypatch.setattr(__main__, "COMPARISONS", few)
    arguments = [
        "--first-seed",
        "7",
        "--num-seeds",
        "2",
        "--num-requests",
        "10",
        "--processes",
        "1",
        "--cache",
        str(tmp_path / "cache"),
    ]
    assert __main__.main([*arguments, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    options = "--comparisons 'colocated,low load,hybrid' --first-seed 7 --num-seeds 2 --num-requests 10"
    assert f"`python -m benchmarks.self_tuning {options}`" in text
    for row in ("LLaDA-8B, ShareGPT at 7", "LLaDA-8B, ShareGPT, 5P3C at 7", "16384", "32768", "auto", cases.BOTH):
        assert f"\n| {row} |" in text
    assert "\n| 512 |" not in text and "\n| 8192 |" not in text


def test_an_unknown_comparison_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["--comparisons", "colocated,other", "--out", str(tmp_path)])
    assert "no comparison 'other'; allowed: colocated, low load, hybrid" in capsys.readouterr().err
