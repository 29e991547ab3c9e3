"""How many forwards the blocks of real answers took, for the simulator's `--steps-per-block`."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path


class StepsFile:
    """A CSV file with the columns request and num_steps, one row per block in order. Rows that are there stay.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._write([] if path.exists() and path.stat().st_size else [("request", "num_steps")])

    def add(self, request_id: str, num_steps: Sequence[int]) -> None:
        """Of the blocks of one answer."""
        self._write((request_id, steps) for steps in num_steps)

    def _write(self, rows: Iterable[tuple[str, int | str]]) -> None:
        with self._path.open("a", newline="") as file:
            csv.writer(file).writerows(rows)
