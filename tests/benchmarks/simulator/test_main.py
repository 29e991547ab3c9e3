from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from benchmarks.simulator.__main__ import main

SHORT = ["--num-requests", "40", "--qps", "3"]


def test_a_run_is_printed_and_written_the_same_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("a", "b"):
        graph = ["--graph", "hybrid", "--prefill", "2", "--colocated", "1", "--out", str(tmp_path / folder)]
        assert main([*SHORT, *graph]) == 0
    printed = capsys.readouterr().out
    for part in (
        "2P1C θ 8192 τ 1024 on h100",
        "whole blocks, seed 1",
        "achieved rate",
        "overflowed",
        "times real time",
    ):
        assert part in printed
    for name in ("summary.json", "requests.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    written = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert written["summary"]["num_completed"] == 40
    assert written["setup"]["mode"] == "whole blocks" and written["setup"]["kv_cache_tokens"] == 90112
    assert written["phases"]["decode"]["p99"] > written["phases"]["decode"]["p50"] > 0
    with (tmp_path / "a" / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 40 and rows[0].keys() >= {"prefill_queue_s", "transfer_s", "num_steps", "latency_s"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--colocated", "2"], "2C τ 1024"),
        (["--graph", "disaggregated"], "5P3D"),
        (["--graph", "conditional", "--prefill", "1", "--colocated", "1"], "1P1C conditional"),
        (["--uncalibrated", "--gpu", "h200", "--colocated", "2", "--steps-per-block", "9"], "2C τ 1024 on h200"),
        (["--arrivals", "closed", "--clients", "3", "--mode", "end-of-text"], "sharegpt, 3 clients"),
    ],
)
def test_every_graph_and_load_runs(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, *arguments]) == 0
    assert expected in capsys.readouterr().out


def test_recorded_steps_and_a_profile_take_the_models_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps, profile = tmp_path / "steps.csv", tmp_path / "profile.csv"
    steps.write_text("request,num_steps\na,2\n")
    profile.write_text(
        "num_decodes,mean_context,prefill_tokens,seconds\n1,1000,0,0.01\n2,1000,0,0.01\n0,0,10,0.5\n0,0,20,0.5\n"
    )
    files = ["--steps-per-block", str(steps), "--profile", str(profile)]
    assert main(["--num-requests", "1", "--out", str(tmp_path), *files]) == 0
    with (tmp_path / "requests.csv").open() as file:
        row = next(csv.DictReader(file))
    num_blocks = float(row["num_steps"]) / 2
    assert float(row["prefill_s"]) == pytest.approx(0.5 * num_blocks)
    assert float(row["decode_s"]) == pytest.approx(0.01 * num_blocks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill", "2"], "no prefill workers"),
        (["--trace", "/no/such.csv"], "such.csv"),
        (["--model", "dream-7b", "--qps", "0"], "above 0"),
        (["--kv-cache-tokens", "100"], "do not fit"),
    ],
)
def test_what_cannot_be_is_said(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
