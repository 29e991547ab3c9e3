"""What a supervisor runs, and how patiently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Program:
    """One process to be.

    Attributes:
        environment: added to the supervisor's own.
        status_url: where it answers /health and /metrics; empty if it does not.
        may_leave: whether exit status 0 means that it was told to leave, and is not to be started again.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    status_url: str = ""
    may_leave: bool = False


@dataclass(frozen=True)
class Backoff:
    """How long to wait before the n-th restart in a row; a run of `healthy_s` ends the row."""

    first_s: float = 1.0
    longest_s: float = 30.0
    healthy_s: float = 60.0

    def delay_s(self, num_deaths: int) -> float:
        return min(self.first_s * 2.0 ** min(num_deaths - 1, 30), self.longest_s)
