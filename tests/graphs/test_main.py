"""The `sangam` command's arguments."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from components.config import SECTIONS
from graphs import local
from graphs.__main__ import CONFIGS, GRAPHS, main
from graphs.launch import Settings


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What `serve` would have run."""
    seen: list[Settings] = []

    def serve(settings: Settings, *_: object) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr(local, "serve", serve)
    return seen


def values(settings: Settings, section: str) -> Mapping[str, Any]:
    return settings.sections[section].model_dump()


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_shipped_configuration_is_the_default(graph: str, served: list[Settings]) -> None:
    assert main(["serve", graph]) == 0
    assert served[0].path == CONFIGS / f"{graph}.yaml"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    main(["serve", graph, "--http-port", str(port)])
    local.check(served[1])


def test_the_shipped_thresholds(served: list[Settings]) -> None:
    for graph in ("hybrid", "disaggregated"):
        main(["serve", graph])
    hybrid, disaggregated = (values(settings, "router")["overflow_threshold"] for settings in served)
    assert (hybrid, disaggregated) == (8192, math.inf)


def test_a_flag_reaches_every_section_that_knows_it(served: list[Settings]) -> None:
    main(["serve", "colocated", "--workers", "3", "--namespace", "mine", "--http-port", "8123", "--max-attempts", "2"])
    [settings] = served
    assert values(settings, "colocated_worker")["num_workers"] == 3
    assert values(settings, "router")["max_attempts"] == 2
    assert values(settings, "frontend")["http_port"] == 8123
    assert {config.namespace for config in settings.sections.values()} == {"mine"}


def test_the_file_is_read_and_flags_win(served: list[Settings], tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("colocated_worker: {num_workers: 4, token_budget: 99}\n")
    main(["serve", "colocated", "-f", str(file), "--colocated", "5"])
    worker = values(served[0], "colocated_worker")
    assert (worker["num_workers"], worker["token_budget"]) == (5, 99)


@pytest.mark.parametrize(
    "argv",
    [[], ["serve"], ["serve", "nonsense"], ["serve", "colocated", "--workers", "x"],
     ["serve", "hybrid", "--pre", "1"], ["drain"], ["drain", "a", "--graph", "nonsense"]],
)  # fmt: skip
def test_wrong_arguments_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(argv)
    assert exit.value.code == 2
    assert "usage: sangam" in capsys.readouterr().err


def test_a_wrong_value_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "colocated", "--workers", "0"]) == 2
    assert "colocated_worker.num_workers" in capsys.readouterr().out


def test_no_model_is_one_line_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "colocated", "--model", str(tmp_path / "nowhere")]) == 2
    assert "no model in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "value", "problem"),
    [
        ("--prefill-worker.page-size", "32", "page_size must be the same for all workers"),
        ("--colocated-worker.dtype", "float16", "dtype must be the same for all workers"),
        ("--prefill-worker.device", "cpu", "got {'prefill_worker': 'float32', 'colocated_worker': 'bfloat16'}"),
        ("--prefill-worker.model", "elsewhere", "model must be the same for every process"),
    ],
)
def test_workers_that_could_not_hand_over_kv_are_refused(
    flag: str,
    value: str,
    problem: str,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # `auto` is a GPU
    assert main(["serve", "hybrid", "--model", str(model), flag, value]) == 2
    assert problem in capsys.readouterr().out


def test_a_disaggregated_graph_that_would_overflow_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "disaggregated", "--model", str(model), "--overflow-threshold", "512"]) == 2
    assert "with router.overflow_threshold 512 prefills would overflow" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
def test_a_port_in_use_is_named_before_anything_starts(
    flag: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port, free = server.getsockname()[1], other.getsockname()[1]
        other.close()
        argv = ["--model", str(model), "--http-port", str(free), flag, str(port), "--log-dir", str(model / "logs")]
        assert main(["serve", "colocated", *argv]) == 2
    output = capsys.readouterr().out
    assert f"port {port}" in output and "already in use" in output and flag in output
    assert not (model / "logs").exists()


def test_one_port_for_both_apis_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    assert main(["serve", "colocated", "--model", str(model), "--http-port", port, "--grpc-port", port]) == 2
    assert f"--http-port and --grpc-port are both {port}" in capsys.readouterr().out


def test_the_command_imports_no_engine() -> None:
    code = (
        "import sys, graphs.__main__, graphs.local\n"
        "bad = {'torch', 'dynamo', 'openai', 'components.router', 'backend'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_key_is_documented() -> None:
    page = (CONFIGS / "README.md").read_text()
    keys = {key for schema in SECTIONS.values() for key in schema.model_fields}
    assert [key for key in sorted(keys) if f"| `{key}` |" not in page] == []
