"""Real processes, tiny ones: restarts, order of stopping, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from graphs.program import Backoff, Program
from graphs.supervisor import ChildFailed, Supervisor

PATIENCE_S = 15.0
QUICK = Backoff(first_s=0.01, longest_s=0.04, healthy_s=60.0)
# Says who it is, then sleeps; on SIGTERM notes its name in `order` and leaves.
POLITE = """
import os, pathlib, signal, sys, time
name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
def leave(*_):
    with (folder / "order").open("a") as order: order.write(name + "\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
(folder / (name + ".pid")).write_text(str(os.getpid()))
time.sleep(60)
"""
STUBBORN = POLITE.replace("signal.SIGTERM, leave", "signal.SIGTERM, signal.SIG_IGN")
# Leaves a process of its own behind.
PARENT = """
import pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
(pathlib.Path(sys.argv[2]) / "grandchild.pid").write_text(str(child.pid))
"""


def program(name: str, code: str, folder: Path) -> Program:
    return Program(name, (sys.executable, "-c", code, name, str(folder)))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.02)


def pid_in(file: Path) -> int | None:
    return int(file.read_text()) if file.exists() and file.read_text() else None


def test_a_dead_program_is_restarted_ever_more_slowly(tmp_path: Path) -> None:
    deaths: list[tuple[str, str, float]] = []

    async def run() -> None:
        supervisor = Supervisor(tmp_path, lambda *death: deaths.append(death), QUICK)
        await supervisor.starting(asyncio.sleep(0))
        supervisor.start([Program("flaky", (sys.executable, "-c", "print('hello'); raise SystemExit(3)"))])
        await until(lambda: len(deaths) >= 4)
        await supervisor.stop()

    asyncio.run(run())
    assert {name for name, _, _ in deaths} == {"flaky"}
    assert {what for _, what, _ in deaths} == {"exited with 3"}
    assert [delay for _, _, delay in deaths][:4] == [0.01, 0.02, 0.04, 0.04]
    assert (tmp_path / "flaky.log").read_text().count("hello") >= 4


def test_a_clean_exit_is_restarted_too_and_a_healthy_run_ends_the_row(tmp_path: Path) -> None:
    deaths: list[tuple[str, str, float]] = []

    async def run() -> None:
        supervisor = Supervisor(tmp_path, lambda *death: deaths.append(death), Backoff(0.01, 10.0, healthy_s=0.0))
        await supervisor.starting(asyncio.sleep(0))
        supervisor.start([Program("leaver", (sys.executable, "-c", ""))])
        await until(lambda: len(deaths) >= 3)
        await supervisor.stop()

    asyncio.run(run())
    assert deaths[:3] == [("leaver", "exited with 0", 0.01)] * 3


@pytest.mark.parametrize(("status", "leaves"), [(0, True), (1, False), (143, False)])
def test_a_worker_that_exits_with_0_has_left_on_purpose(tmp_path: Path, status: int, leaves: bool) -> None:
    deaths: list[str] = []
    left: list[str] = []
    code = f"print('hello'); raise SystemExit({status})"

    async def run() -> None:
        supervisor = Supervisor(tmp_path, lambda name, *_: deaths.append(name), QUICK, on_leave=left.append)
        await supervisor.starting(asyncio.sleep(0))
        supervisor.start([Program("worker", (sys.executable, "-c", code), may_leave=True)])
        await until(lambda: bool(left or len(deaths) >= 2))
        await asyncio.sleep(0.1)
        await supervisor.stop()

    asyncio.run(run())
    assert left == (["worker"] if leaves else [])
    assert not deaths if leaves else len(deaths) >= 2
    assert (tmp_path / "worker.log").read_text().count("hello") == 1 or not leaves


def test_nobody_may_leave_while_the_graph_starts(tmp_path: Path) -> None:
    async def run() -> None:
        supervisor = Supervisor(tmp_path, lambda *_: None)
        supervisor.start([Program("worker", (sys.executable, "-c", ""), may_leave=True)])
        with pytest.raises(ChildFailed, match="worker exited with 0 while starting"):
            await supervisor.starting(asyncio.sleep(60))
        await supervisor.stop()

    asyncio.run(run())


def test_a_killed_program_comes_back_as_a_new_process(tmp_path: Path) -> None:
    deaths: list[tuple[str, str, float]] = []
    pid_file = tmp_path / "a.pid"

    async def run() -> None:
        supervisor = Supervisor(tmp_path, lambda *death: deaths.append(death), QUICK)
        await supervisor.starting(asyncio.sleep(0))
        supervisor.start([program("a", POLITE, tmp_path)])
        await until(lambda: pid_in(pid_file) is not None)
        first = pid_in(pid_file)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: pid_in(pid_file) not in (None, first))
        await supervisor.stop()

    asyncio.run(run())
    assert deaths == [("a", "was killed by SIGKILL", 0.01)]
    assert not is_alive(pid_in(pid_file) or 0)


def test_backoff_is_bounded() -> None:
    assert Backoff().delay_s(1) == 1.0
    assert Backoff().delay_s(10_000) == 30.0


def test_stages_stop_in_reverse_order(tmp_path: Path) -> None:
    async def run() -> None:
        supervisor = Supervisor(tmp_path, lambda *_: None)
        for name in ("nats", "worker", "router", "frontend"):
            supervisor.start([program(name, POLITE, tmp_path)])
        await until(lambda: all(pid_in(tmp_path / f"{n}.pid") for n in ("nats", "worker", "router", "frontend")))
        await supervisor.stop()

    asyncio.run(run())
    assert (tmp_path / "order").read_text().split() == ["frontend", "router", "worker", "nats"]


def test_who_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    async def run() -> None:
        supervisor = Supervisor(tmp_path, lambda *_: None, grace_s=0.2)
        supervisor.start([program("polite", POLITE, tmp_path)])
        supervisor.start([program("stubborn", STUBBORN, tmp_path)])
        await until(lambda: all(pid_in(tmp_path / f"{name}.pid") for name in ("polite", "stubborn")))
        await supervisor.stop()

    asyncio.run(run())
    assert (tmp_path / "order").read_text().split() == ["polite"]
    assert not is_alive(pid_in(tmp_path / "stubborn.pid") or 0)


def test_kill_does_not_wait_for_the_grace_period(tmp_path: Path) -> None:
    async def run() -> None:
        supervisor = Supervisor(tmp_path, lambda *_: None, grace_s=60.0)
        supervisor.start([program("stubborn", STUBBORN, tmp_path)])
        await until(lambda: pid_in(tmp_path / "stubborn.pid") is not None)
        stopping = asyncio.create_task(supervisor.stop())
        await asyncio.sleep(0.05)
        supervisor.kill()
        await asyncio.wait_for(stopping, PATIENCE_S)

    asyncio.run(run())
    assert not is_alive(pid_in(tmp_path / "stubborn.pid") or 0)


def test_what_a_dead_program_left_running_is_killed(tmp_path: Path) -> None:
    async def run() -> None:
        supervisor = Supervisor(tmp_path, lambda *_: None, Backoff(first_s=60.0))
        await supervisor.starting(asyncio.sleep(0))
        supervisor.start([program("parent", PARENT, tmp_path)])
        await until(lambda: pid_in(tmp_path / "grandchild.pid") is not None)
        await until(lambda: not is_alive(pid_in(tmp_path / "grandchild.pid") or 0))
        await supervisor.stop()

    asyncio.run(run())


def test_a_death_before_all_is_ready_is_a_failure(tmp_path: Path) -> None:
    async def run() -> None:
        supervisor = Supervisor(tmp_path, lambda *_: None)
        supervisor.start(
            [program("good", POLITE, tmp_path), Program("bad", (sys.executable, "-c", "exit('no weights')"))]
        )
        try:
            with pytest.raises(ChildFailed, match="bad exited with 1 while starting") as failure:
                await supervisor.starting(asyncio.sleep(60))
            assert failure.value.log.read_text() == "no weights\n"
        finally:
            await supervisor.stop()

    asyncio.run(run())


def test_a_program_that_does_not_exist_says_so(tmp_path: Path) -> None:
    async def run() -> None:
        supervisor = Supervisor(tmp_path, lambda *_: None)
        supervisor.start([Program("typo", ("no-such-program",))])
        with pytest.raises(ChildFailed, match="typo exited with 127") as failure:
            await supervisor.starting(asyncio.sleep(60))
        assert "cannot run no-such-program" in failure.value.log.read_text()
        await supervisor.stop()

    asyncio.run(run())


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_sigkill_of_the_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    script = f"""
        import asyncio, pathlib
        from graphs.program import Program
        from graphs.supervisor import Supervisor
        async def run():
            supervisor = Supervisor(pathlib.Path({str(tmp_path)!r}), lambda *_: None)
            for name in "ab":
                supervisor.start([Program(name, ({sys.executable!r}, "-c", {STUBBORN!r}, name, {str(tmp_path)!r}))])
            await asyncio.sleep(60)
        asyncio.run(run())
    """
    supervisor = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    try:
        assert eventually(lambda: all(pid_in(tmp_path / f"{name}.pid") for name in "ab"))
    finally:
        supervisor.kill()
        supervisor.wait()
    assert eventually(lambda: not any(is_alive(pid_in(tmp_path / f"{name}.pid") or 0) for name in "ab"))
