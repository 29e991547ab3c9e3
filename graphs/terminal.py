"""What `sangam serve` shows: progress, deaths, errors, and where to go when all is up."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from components.config import DEMO_MODELS
from graphs.follower import tail
from graphs.launch import Settings
from graphs.program import Program

IMPORTANT = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b")
# What Dynamo logs of the watches of a process that ends.
HARMLESS = re.compile(r"storage::kv\b.*channel closed")
COLOURS = ("cyan", "magenta", "green", "blue", "yellow", "bright_cyan", "bright_magenta", "bright_green")
TAIL_LINES = 20


class Terminal:
    """Quiet by default: of the processes' own lines only errors. All of them if `verbose`."""

    def __init__(self, verbose: bool, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, markup=False, soft_wrap=True)
        self._verbose = verbose
        self._stopping = False  # what processes say about each other's end interests nobody
        self._status: Status | None = None
        self._started = time.monotonic()
        self._colours: dict[str, str] = {}

    def line(self, name: str, line: str) -> None:
        """One line that a process wrote."""
        is_shown = not self._stopping and IMPORTANT.search(line) and not HARMLESS.search(line)
        if line and (self._verbose or is_shown):
            colour = self._colours.setdefault(name, COLOURS[len(self._colours) % len(COLOURS)])
            self._console.print(Text.assemble((f"{name:<19}│ ", colour), line))

    def waiting(self, text: str) -> None:
        """What the start is waiting for; replaces what was said before."""
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(text)

    def reached(self, text: str) -> None:
        """One step of the start is done."""
        self._console.print(Text.assemble(("✓ ", "green"), f"{text} ", (f"{self._elapsed_s():.1f} s", "dim")))

    def died(self, name: str, what: str, delay_s: float) -> None:
        self._console.print(Text(f"✗ {name} {what}; next try in {delay_s:g} s", "yellow"))

    def left(self, name: str) -> None:
        self._console.print(Text.assemble(("✓ ", "green"), f"{name} drained and left"))

    def cannot_note(self, error: OSError) -> None:
        """The graph runs, but `sangam drain` cannot know."""
        problem = f"cannot write {error.filename}: {error.strerror}"
        self._console.print(Text(f"✗ {problem}; `sangam drain` needs the URL of a worker, not its name", "yellow"))

    def ending(self) -> None:
        """From now on the processes end, and only `failed` still shows what they said."""
        self.settle()
        self._stopping = True

    def stopping(self, reason: str) -> None:
        self.ending()
        self._console.print(f"{reason}: stopping (once more to kill everything at once)")

    def failed(self, message: str, log: Path | None = None) -> None:
        """Why the graph did not come up, with the end of that process's log."""
        self.settle()
        self._console.print(Text(f"✗ {message}", "bold red"))
        if log:
            for line in tail(log, TAIL_LINES) or ["(it printed nothing)"]:
                self._console.print(Text(f"  {line}", "dim"))
            self._console.print(Text(f"  the whole log: {log}"))

    def ready(self, settings: Settings, programs: Iterable[Program], log_dir: Path) -> None:
        self.settle()
        table = Table("process", "its /health and /metrics", box=None, header_style="dim", pad_edge=False)
        for program in programs:
            table.add_row(program.name, program.status_url)
        frontend = settings.frontend
        grpc = f" and KServe gRPC at {frontend.http_host}:{frontend.grpc_port}" if frontend.grpc_port else ""
        self._console.print(table)
        self._console.print(f"logs in {log_dir}\n")
        self._console.print(Text(f"{frontend.model_name} answers at {settings.url}/v1{grpc}", "bold green"))
        self._console.print(f"{curl(settings)}\n\nCtrl-C stops everything.")

    def settle(self) -> None:
        """No more progress to show."""
        if self._status:
            self._status.stop()
            self._status = None

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started


def curl(settings: Settings) -> str:
    """A line to paste into a shell."""
    config = settings.frontend
    prompt = "count from 7 to 40" if config.model.resolve() in DEMO_MODELS.values() else "Why is the sky blue?"
    body = {"model": config.model_name, "messages": [{"role": "user", "content": prompt}], "max_tokens": 64}
    return (
        f"curl {shlex.quote(settings.url + '/v1/chat/completions')}"
        f" -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )
