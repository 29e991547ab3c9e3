"""Which GPU each worker gets: one process per GPU, round and round where there are more processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path


def in_turn() -> Iterator[str]:
    """Values of CUDA_VISIBLE_DEVICES for one worker after the other; nothing where no GPU is to be seen."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = asked.split(",") if asked is not None else _installed()
    return itertools.cycle(name for name in names if name)


def runs_on_cpu(device: str) -> bool:
    """Whether a worker of this `device` computes on this machine's CPU."""
    return device == "cpu" or (device == "auto" and not any(in_turn()))


def _installed() -> list[str]:
    numbers = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return sorted((number for number in numbers if number.isdigit()), key=int)
