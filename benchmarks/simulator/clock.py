"""Simulated time: calls in order of when they are due."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """What is due at the same instant is called in the order in which it was asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._num_asked = 0

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        self._num_asked += 1
        heappush(self._calls, (self.now + delay_s, self._num_asked, call, args))

    def run(self) -> None:
        """Until nothing is due any more."""
        calls = self._calls
        while calls:
            self.now, _, call, args = heappop(calls)
            call(*args)
