"""How far a run is, on the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.metrics import Outcome

Answered = Callable[[Outcome], None]
"""Is told of every request that has been answered or has failed."""


def ignore(outcome: Outcome) -> None:
    """Shows nothing."""


Advance = Callable[[str], None]
"""Is told of every step, with what is to be noted beside the bar."""


@contextlib.contextmanager
def steps(total: int | None, label: str) -> Iterator[Advance]:
    """A bar on stderr while the block runs; nothing where stderr is no terminal.

    Args:
        total: how many steps there will be; None if nobody knows.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    note = TextColumn("{task.fields[note]}", style="red")
    with Progress(*columns, note, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=total, note="")
        yield lambda note: progress.update(task, advance=1, note=note)


@contextlib.contextmanager
def bar(total: int | None, label: str) -> Iterator[Answered]:
    """Steps that are requests; those that failed are counted beside it."""
    with steps(total, label) as advance:
        num_errors = 0

        def answered(outcome: Outcome) -> None:
            nonlocal num_errors
            num_errors += bool(outcome.error)
            advance(f"{num_errors} errors" if num_errors else "")

        yield answered
