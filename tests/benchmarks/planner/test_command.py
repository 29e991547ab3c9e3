from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from benchmarks.planner import command
from benchmarks.planner.planning import Effort
from graphs import plan
from graphs.__main__ import GRAPHS
from graphs.launch import Settings

ARGUMENTS = {
    "--trace": "sharegpt",
    "--model": "llada-8b",
    "--gpu": "h100",
    "--num-gpus": "2",
    "--slo": "p99<2s",
    "--num-requests": "60",
}


@pytest.fixture(autouse=True)
def trace(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Answers of one or two blocks: much is simulated in little time."""
    path = tmp_path_factory.mktemp("trace") / "short.csv"
    path.write_text("num_prompt_tokens,num_output_tokens\n300,64\n700,32\n90,20\n500,50\n")
    ARGUMENTS["--trace"] = str(path)


def run(**changes: str) -> int:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    given = ARGUMENTS | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    arguments = parser.parse_args([f"{name}={value}" for name, value in given.items()])
    return command.run(arguments, Effort(40, 1.0), num_bounds=1.0)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)


def test_a_plan_is_printed_drawn_and_can_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(out=str(tmp_path), num_seeds="2") == 0
    printed = capsys.readouterr().out
    assert re.search(r"bears \d+\.\d\d requests/s within p99<2s \(.* over 2 seeds\)", printed)
    for part in ("2C τ", "1P1D", "1P1C θ", "GPU s/request", "of 2", "mean / p99"):
        assert part in printed
    (path,) = tmp_path.glob("*.yaml")
    graph = path.stem
    assert printed.split()[0] in ("2C", "1P1D", "1P1C")
    assert f"sangam serve {graph} -f {path} --model DIR" in printed
    Settings(GRAPHS[graph], path, {})
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in ("1", "1", "5"):
        assert run(seed=seed, num_gpus="1", num_seeds="1") == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    assert "colocated_worker:" in outputs[0], "without --out the file is printed"


def test_nothing_feasible_says_what_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(slo="p99<100ms,mean<200ms") == 1
    assert re.search(r"nothing meets p99<0.1s,mean<0.2s: .* p99 \d+\.\d\d s, mean \d+\.\d\d s", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slo": "p99<20"}, "'p99<20' is no bound"),
        ({"num_gpus": "0"}, "--num-gpus must be 1 or more"),
        ({"num_seeds": "0"}, "--num-seeds must be 1 or more"),
        ({"model": "gpt-2"}, "--model gpt-2 is not known; allowed: llada-8b"),
        ({"gpu": "tpu"}, "gpu='tpu' is not known; allowed: h100"),
        ({"trace": "/no/such.csv"}, "/no/such.csv"),
        ({"canvas_length": "32"}, "does not fit the canvas of 32"),
        ({"out": "/dev/null/folder"}, "/dev/null/folder"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    changes: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(**changes) == 2
    error = capsys.readouterr().err
    assert error.startswith("sangam plan: ") and message in error and error.count("\n") == 1
