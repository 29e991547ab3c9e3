"""The files that say what runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphs import state
from graphs.state import Process, RunningGraph, StateFile

WORKER, ROUTER = Process("http://127.0.0.1:1", True), Process("http://127.0.0.1:2", False)
HYBRID = RunningGraph("hybrid", 8000, 42, {"router": ROUTER, "worker.0": WORKER, "worker.1": WORKER})
COLOCATED = RunningGraph("colocated", 8100, 43, {"router": ROUTER, "worker.0": WORKER})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "sangam"


def test_a_user_without_a_home_has_a_folder_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert state.folder().is_absolute()


def test_nothing_has_ever_run() -> None:
    assert state.running() == []


def test_what_runs_is_there_until_it_ends(folder: Path) -> None:
    hybrid, colocated = StateFile(HYBRID), StateFile(COLOCATED)
    assert state.running() == [COLOCATED, HYBRID]
    assert HYBRID.workers == ["worker.0", "worker.1"]
    assert HYBRID.still_has("router") and not HYBRID.still_has("worker.2")
    hybrid.close()
    assert state.running() == [COLOCATED]
    assert not HYBRID.still_has("router")
    colocated.close()
    assert list(folder.iterdir()) == []


def test_who_left_is_forgotten(folder: Path) -> None:
    file = StateFile(HYBRID)
    file.forget("worker.0")
    [graph] = state.running()
    assert graph.workers == ["worker.1"]
    assert not HYBRID.still_has("worker.0") and HYBRID.still_has("worker.1")
    file.forget("worker.1")
    assert state.running()[0].workers == []
    assert [path.name for path in folder.iterdir()] == ["hybrid-8000.json"]
    file.close()


def test_what_a_killed_process_left_behind_does_not_run(folder: Path) -> None:
    code = (
        "import os, signal\n"
        "from graphs.state import RunningGraph, StateFile\n"
        "file = StateFile(RunningGraph('hybrid', 8000, os.getpid(), {}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert (folder / "hybrid-8000.json").exists()
    assert state.running() == []
    file = StateFile(HYBRID)
    assert state.running() == [HYBRID]
    file.close()


def test_a_file_that_is_another_s_by_now_stays() -> None:
    first, second = StateFile(HYBRID), StateFile(HYBRID)
    first.close()
    assert state.running() == [HYBRID]
    second.close()


def test_what_cannot_be_read_is_passed_over(folder: Path) -> None:
    file = StateFile(HYBRID)
    (folder / "broken.json").write_text("{")
    with (folder / "hybrid-8000.json").open("r+") as other:
        other.write('{"graph": "from another version"}')
        other.truncate()
    assert state.running() == []
    file.close()
