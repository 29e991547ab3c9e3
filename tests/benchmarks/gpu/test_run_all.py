"""Everything that the GPU runs, at toy size on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import run_all
from benchmarks.simulator.latency import Measured


def test_a_toy_run_leaves_a_report_and_tables_that_the_simulator_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_all", "--toy", "--out", str(tmp_path)])
    run_all.main()
    report = (tmp_path / "report.md").read_text()
    assert report in capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    for name in run_all.ON_CPU.models:
        assert f"## {name}" in report
        found = results[name]
        steps = found["step_times"]
        batches = {(step["num_decodes"], step["context"]) for step in steps if step["num_decodes"]}
        assert batches == {(b, c) for b in run_all.ON_CPU.batches for c in run_all.ON_CPU.contexts}
        assert len(found["no graphs either"]) == len(run_all.ON_CPU.batches)
        assert [run["token_budget"] for run in found["serving"]] == list(run_all.ON_CPU.token_budgets)
        assert len(found["service_s"]) == run_all.ON_CPU.num_requests
        latency = Measured(tmp_path / f"latency-{name}.csv")
        step = next(step for step in steps if step["num_decodes"] == 2)
        assert latency.step_s((), 2, 2 * step["context"]) == pytest.approx(step["seconds"], abs=1e-6)


def test_parts_for_which_no_time_is_left_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run_all", "--toy", "--out", str(tmp_path), "--seconds", "0", "--model", "toy-llada"]
    monkeypatch.setattr(sys, "argv", arguments)
    run_all.main()
    assert "serving: left out" in capsys.readouterr().out
    assert "serving" not in json.loads((tmp_path / "results.json").read_text())["toy-llada"]


def test_a_part_that_fails_does_not_cost_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run_all", "--toy", "--out", str(tmp_path), "--model", "toy-llada"])

    def breaks(run: Callable[[], object]) -> None:
        raise RuntimeError("no profiler")

    monkeypatch.setattr(run_all, "busy_share", breaks)
    run_all.main()
    found = json.loads((tmp_path / "results.json").read_text())["toy-llada"]
    assert len(found["failures"]) == 1 and "no profiler" in found["failures"][0]
    assert "busy_shares" not in found and found["step_times"] and found["serving"]
    assert "no profiler" in (tmp_path / "report.md").read_text()


def test_checks_that_hang_are_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(command: object, **options: Any) -> None:
        options["stdout"].write("test_one PASSED")
        raise subprocess.TimeoutExpired("pytest", options["timeout"])

    monkeypatch.setattr(subprocess, "run", hangs)
    run_all.Run(run_all.ON_CPU, tmp_path, 100.0).checks()
    report = (tmp_path / "report.md").read_text()
    assert "cut off" in report and "test_one PASSED" in report


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--toy", "--model", "nope"], "invalid choice: 'nope'"),
        (["--toy", "--seconds", "-1"], "is no number of seconds"),
        (["--toy", "--seconds", "nan"], "is no number of seconds"),
        (["--toy", "--out", __file__], "--out: "),
        pytest.param(
            [], "torch sees no GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
        ),
    ],
)
def test_mistakes_are_said_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_all", "--out", str(tmp_path / "out"), *flags])
    with pytest.raises(SystemExit) as ended:
        run_all.main()
    assert ended.value.code == 2 and message in capsys.readouterr().err
