"""What runs on this machine: `sangam serve` writes it down, `sangam drain` reads it.

One file per graph and port. Its writer holds a lock on it for as long as it lives, so that what a killed
`sangam serve` left behind is known for what it is; process ids would be used again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True)
class Process:
    """One process of a running graph: where it answers, and whether it may be told to leave."""

    status_url: str
    may_leave: bool


@dataclass(frozen=True)
class RunningGraph:
    """A graph that `sangam serve` runs, as process `pid`; `processes` by the names that it prints."""

    graph: str
    http_port: int
    pid: int
    processes: Mapping[str, Process]

    @property
    def path(self) -> Path:
        return folder() / f"{self.graph}-{self.http_port}.json"

    @property
    def workers(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.may_leave]

    def still_has(self, name: str) -> bool:
        """Whether the graph runs on, and that process with it, as far as its supervisor has noticed."""
        return any(graph.pid == self.pid and name in graph.processes for graph in running())

    def __str__(self) -> str:
        return f"{self.graph} (--http-port {self.http_port})"


def folder() -> Path:
    """Where this user's state is kept; some users of containers have no home."""
    if given := os.environ.get("XDG_STATE_HOME"):
        return Path(given, "sangam")
    home = os.path.expanduser("~")
    if home == "~":
        return Path(tempfile.gettempdir(), f"sangam-{os.getuid()}")
    return Path(home, ".local", "state", "sangam")


def running() -> list[RunningGraph]:
    """The graphs that run on this machine."""
    found = []
    for path in sorted(folder().glob("*.json")):
        # Gone meanwhile, or written by another version: not to be talked to either way.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), path.open() as file:
            if _is_locked(file):
                found.append(_read(json.load(file)))
    return found


class StateFile:
    """A running graph's file.

    Raises:
        OSError: it cannot be written; from every method.
    """

    def __init__(self, graph: RunningGraph) -> None:
        self._files: list[IO[str]] = []
        self._write(graph)

    def forget(self, name: str) -> None:
        """A process has left."""
        others = {other: process for other, process in self.graph.processes.items() if other != name}
        self._write(dataclasses.replace(self.graph, processes=others))

    def close(self) -> None:
        """Removes the file, unless it is another's by now."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.graph.path), os.fstat(self._files[-1].fileno())):
                self.graph.path.unlink()
        for file in self._files:
            file.close()

    def _write(self, graph: RunningGraph) -> None:
        """Puts a new version in place as a whole, locked before anyone can see it."""
        self.graph = graph
        graph.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, new = tempfile.mkstemp(prefix=f".{graph.path.stem}.", dir=graph.path.parent)
        file = open(descriptor, "w")
        # The versions before stay open and locked: who is just reading one must not think that we are gone.
        self._files.append(file)
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump(dataclasses.asdict(graph), file, indent=1)
        file.flush()
        os.replace(new, graph.path)


def _is_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _read(document: dict[str, Any]) -> RunningGraph:
    processes = {name: Process(**process) for name, process in document.pop("processes").items()}
    return RunningGraph(**document, processes=processes)
