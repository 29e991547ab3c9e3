"""Keeps programs running: ordered start and stop, restart with back-off, nothing left behind.

Ours because neither circus 0.19 nor supervisor 4.3 knows a parent-death signal or exponential back-off
(circus retries at a fixed interval from a plugin process, supervisord gives up after a linear one).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from graphs.program import Backoff, Program

CHILD = Path(__file__).with_name("child.py")
T = TypeVar("T")


class ChildFailed(RuntimeError):
    """A program ended although the graph was not up yet."""

    def __init__(self, name: str, what: str, log: Path) -> None:
        super().__init__(f"{name} {what} while starting")
        self.name, self.log = name, log


@dataclass
class _Child:
    program: Program
    log: Path
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    process: asyncio.subprocess.Process | None = None
    task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        self.stopping.set()
        if self.process and self.process.returncode is None:
            self.process.terminate()

    def kill(self) -> None:
        """The whole process group: also what the program itself started."""
        self.stopping.set()
        if self.process:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Supervisor:
    """Runs programs in stages. Everything happens in the event loop that it is made in.

    Args:
        log_dir: gets one `NAME.log` per program with all it prints, over all its restarts.
        on_death: called with (name, what happened, seconds until the restart).
        on_leave: called with the name of a program that left on purpose, once all were ready.
        grace_s: how long a stage may take to stop after SIGTERM, before SIGKILL.
    """

    def __init__(
        self,
        log_dir: Path,
        on_death: Callable[[str, str, float], None],
        backoff: Backoff | None = None,
        grace_s: float = 10.0,
        on_leave: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._log_dir, self._on_death, self._on_leave, self._grace_s = log_dir, on_death, on_leave, grace_s
        self._backoff = backoff or Backoff()
        self._stages: list[list[_Child]] = []
        self._starting = True
        self._failure: asyncio.Future[ChildFailed] = asyncio.get_running_loop().create_future()

    def start(self, programs: Sequence[Program]) -> None:
        """Starts one stage: programs that may come up, and are later stopped, all at once."""
        stage = [_Child(program, self._log_dir / f"{program.name}.log") for program in programs]
        self._stages.append(stage)
        for child in stage:
            child.log.write_bytes(b"")
            child.task = asyncio.create_task(self._keep(child))

    async def starting(self, readiness: Coroutine[Any, Any, T]) -> T:
        """Awaits `readiness`; until it is there no program may end, afterwards they are restarted.

        Raises:
            ChildFailed: a program ended first.
        """
        task = asyncio.ensure_future(readiness)
        either: set[asyncio.Future[Any]] = {task, self._failure}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise self._failure.result()
            self._starting = False
            return await task
        finally:
            task.cancel()

    async def stop(self) -> None:
        """Stops the stages, last started first: SIGTERM, and SIGKILL after the grace period."""
        for stage in reversed(self._stages):
            for child in stage:
                child.stop()
            tasks = {child.task for child in stage if child.task}
            if tasks and (await asyncio.wait(tasks, timeout=self._grace_s))[1]:
                for child in stage:
                    child.kill()
                await asyncio.wait(tasks)

    def kill(self) -> None:
        """Kills everything at once; `stop` then has nothing left to wait for."""
        for child in (child for stage in self._stages for child in stage):
            child.kill()

    async def _keep(self, child: _Child) -> None:
        num_deaths, clock = 0, asyncio.get_running_loop().time
        while not child.stopping.is_set():
            started = clock()
            try:
                status = await self._run(child)
                what = f"exited with {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
            except OSError as error:  # no more processes, no more disk: as good as a death
                status, what = 1, f"could not be started ({error})"
            if child.stopping.is_set():
                return
            if self._starting:
                if not self._failure.done():
                    self._failure.set_result(ChildFailed(child.program.name, what, child.log))
                return
            if status == 0 and child.program.may_leave:
                self._on_leave(child.program.name)
                return
            num_deaths = 1 if clock() - started >= self._backoff.healthy_s else num_deaths + 1
            delay = self._backoff.delay_s(num_deaths)
            self._on_death(child.program.name, what, delay)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(child.stopping.wait(), delay)

    async def _run(self, child: _Child) -> int:
        argv = (sys.executable, "-I", "-S", str(CHILD), str(os.getpid()), *child.program.argv)
        with child.log.open("ab") as log:
            process = child.process = await asyncio.create_subprocess_exec(
                *argv,
                env={**os.environ, **child.program.environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C is the supervisor's to pass on, in order
            )
        if child.stopping.is_set():  # asked for while the process was being made
            child.kill()
        status = await process.wait()
        child.process = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what the program started and did not clean up
        return status
