"""How far `sangam generate` is, on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_INTERVAL_S = 10.0
_BAR_INTERVAL_S = 0.1


@dataclass
class Totals:
    """Of this run alone, not of one that it goes on with."""

    num_answers: int = 0
    num_failures: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_forwards: int = 0
    seconds: float = 0.0

    def rates(self) -> str:
        per_second = self.num_tokens / max(self.seconds, 1e-9)
        return f"{per_second:,.0f} tokens/s, {self.num_tokens / max(self.num_forwards, 1):.2f} tokens/forward"

    def summary(self) -> str:
        """`tokens per forward` counts a forward once for each request in it; `requests per step` is what shared one."""
        per_step = self.num_forwards / max(self.num_steps, 1)
        return (
            f"{self.num_answers + self.num_failures:,} requests, {self.num_failures:,} failed; "
            f"{self.num_tokens:,} tokens returned in {self.seconds:.2f} s: {self.rates()}, "
            f"{per_step:.1f} requests/step"
        )


class GenerateProgress:
    """Args:
    num_requests: how many there are; None if nobody knows.
    num_answered: how many of them an earlier run has answered.
    """

    def __init__(self, num_requests: int | None, num_answered: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._num_requests, self._num_answered = num_requests, num_answered
        self._shown_at = time.monotonic()
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal, transient=True)
        self._task = self._bar.add_task("", total=num_requests, completed=num_answered)

    def update(self, totals: Totals) -> None:
        is_bar, now = self._console.is_terminal, time.monotonic()
        if now - self._shown_at < (_BAR_INTERVAL_S if is_bar else LINE_INTERVAL_S):
            return
        self._shown_at = now
        num_done = self._num_answered + totals.num_answers + totals.num_failures
        failed = f", {totals.num_failures} failed" if totals.num_failures else ""
        self._bar.update(self._task, completed=num_done, description=f"{totals.rates()}{failed}")
        if not is_bar:
            of = "" if self._num_requests is None else f"/{self._num_requests}"
            self.say(f"{num_done}{of} answers, {totals.rates()}{failed}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def __enter__(self) -> GenerateProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._bar.stop()
