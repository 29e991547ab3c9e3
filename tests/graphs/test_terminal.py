"""Which of the processes' lines are shown."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from graphs.terminal import Terminal

WATCH = "2026-01-01T00:00:00Z ERROR dynamo_runtime::storage::kv: KeyValueStoreManager.watch failed err=channel closed"


@pytest.mark.parametrize(
    ("line", "verbose", "shown"),
    [
        ("INFO serving", False, False),
        ("INFO serving", True, True),
        ("ERROR no memory", False, True),
        (WATCH, False, False),  # every process says that when it ends, one that was drained too
        (WATCH, True, True),
        ("ERROR dynamo_runtime::storage::kv: no such bucket", False, True),
    ],
)
def test_errors_are_shown_and_all_of_it_if_asked_for(line: str, verbose: bool, shown: bool) -> None:
    output = io.StringIO()
    Terminal(verbose, Console(file=output, soft_wrap=True)).line("worker.0", line)
    assert output.getvalue() == (f"{'worker.0':<19}│ {line}\n" if shown else "")


def test_once_all_is_ending_errors_are_not_shown() -> None:
    output = io.StringIO()
    terminal = Terminal(False, Console(file=output))
    terminal.ending()
    terminal.line("worker.0", "ERROR the router is gone")
    assert output.getvalue() == ""
