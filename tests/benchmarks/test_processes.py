from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import processes

# Two workers that write down their process ids and would go on for a minute.
PARENT = """
import os, sys, time
from pathlib import Path
from benchmarks import processes

def work(folder):
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(60)

if __name__ == "__main__":
    with processes.pool(2) as pool:
        for future in [pool.submit(work, sys.argv[1]) for _ in range(4)]:
            future.result()
"""


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_for(condition: object, seconds: float) -> bool:
    assert callable(condition)
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return bool(condition())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_the_parent_ends_its_workers(how: signal.Signals, tmp_path: Path) -> None:
    script, folder = tmp_path / "parent.py", tmp_path / "workers"
    script.write_text(PARENT)
    folder.mkdir()
    parent = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert wait_for(lambda: len(list(folder.iterdir())) == 2, 30)
        workers = [int(path.name) for path in folder.iterdir()]
        assert all(map(is_running, workers))
        parent.send_signal(how)
        _, stderr = parent.communicate(timeout=10)
        assert parent.returncode != 0
        assert wait_for(lambda: not any(map(is_running, workers)), 5)
        assert stderr.count("Traceback") == (how is signal.SIGINT), "of the parent's KeyboardInterrupt alone"
    finally:
        parent.kill()


def test_an_exception_does_not_wait_for_what_still_runs() -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match="enough"), processes.pool(2) as pool:
        sleeping = pool.submit(time.sleep, 60)
        assert wait_for(sleeping.running, 30)
        raise ValueError("enough")
    assert time.monotonic() - started < 30


def test_results_come_from_other_processes() -> None:
    with processes.pool(1) as pool:
        assert pool.submit(os.getpid).result() != os.getpid()
