"""Reads what processes append to their log files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path


def tail(log: Path, num_lines: int) -> list[str]:
    """The last lines of a log; none if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 200 * num_lines))
            return file.read().decode(errors="replace").splitlines()[-num_lines:]
    except OSError:
        return []


class Follower:
    """Hands on the whole lines that appear in a folder's `*.log` files, as (file stem, line)."""

    def __init__(self, log_dir: Path, on_line: Callable[[str, str], None]) -> None:
        self._log_dir, self._on_line = log_dir, on_line
        self._read: dict[Path, int] = {}

    async def run(self, interval_s: float = 0.2) -> None:
        """Never returns; cancel it."""
        while True:
            self.poll()
            await asyncio.sleep(interval_s)

    def poll(self) -> None:
        for log in sorted(self._log_dir.glob("*.log")):
            with log.open("rb") as file:
                file.seek(self._read.get(log, 0))
                lines, _, rest = file.read().rpartition(b"\n")
                self._read[log] = file.tell() - len(rest)
            for line in lines.decode(errors="replace").splitlines():
                self._on_line(log.stem, line)
