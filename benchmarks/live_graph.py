"""A graph that a benchmark starts by `sangam serve`, as a process of its own, and asks for its metrics."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx2

from benchmarks import scrape
from benchmarks.scrape import Sample
from graphs.supervisor import CHILD

ROOT = Path(__file__).resolve().parents[1]
START_S, STOP_S = 180.0, 60.0
READY = "Ctrl-C stops everything"
ROW = re.compile(r"^(\w+(?:\.\d+)?) +(http://\S+) *$", re.MULTILINE)
OURS = ("router", "prefill_worker", "colocated_worker")


class GraphFailed(RuntimeError):
    """The graph did not come up, or is gone; the message ends with what it printed last."""


class LiveGraph:
    """Starts on entry, stops on exit; nothing of it survives this process.

    Args:
        arguments: of `sangam serve`, the graph's name first.
        folder: for its logs; must exist.
    """

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self._arguments, self._folder = tuple(arguments), folder
        self._output = folder / "serve.log"

    def __enter__(self) -> LiveGraph:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "graphs", "serve", *self._arguments]
        command += [f"--http-port={port}", f"--log-dir={self._folder / 'logs'}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(self._folder), "NO_COLOR": "1"}
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                # Killed when this process is, and out of reach of the terminal's Ctrl-C, which is ours to handle.
                [sys.executable, str(CHILD), str(os.getpid()), *command],
                stdout=output, stderr=output, cwd=ROOT, env=environment, start_new_session=True,
            )  # fmt: skip
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        self.status_urls = parse_table(self._output.read_text(errors="replace"))
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_processes(self) -> int:
        """The graph's processes: those with a status page, NATS and `serve` itself."""
        return len(self.status_urls) + 2

    def metrics(self) -> dict[Sample, float]:
        """The metrics of the router and of all workers, added up.

        Raises:
            GraphFailed: one of them does not answer.
        """
        pages = []
        with httpx2.Client(trust_env=False, timeout=10.0) as http:
            for name, url in self.status_urls.items():
                if name.partition(".")[0] in OURS:
                    try:
                        pages.append(scrape.parse(http.get(f"{url}/metrics").raise_for_status().text))
                    except httpx2.HTTPError as problem:
                        raise self._failed(f"{name} does not show its metrics: {problem!r}") from None
        return scrape.added(pages)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while READY not in self._output.read_text(errors="replace"):
            if self._process.poll() is not None:
                raise self._failed(f"ended with {self._process.returncode} while starting")
            if time.monotonic() > deadline:
                raise self._failed(f"was not ready after {START_S:g} s")
            time.sleep(0.1)

    def _stop(self) -> None:
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _failed(self, what: str) -> GraphFailed:
        last = "\n".join(self._output.read_text(errors="replace").splitlines()[-20:])
        return GraphFailed(f"`sangam serve {' '.join(self._arguments)}` {what}\n{last}")


def parse_table(output: str) -> dict[str, str]:
    """Program -> its status URL, from what `sangam serve` prints once all is up."""
    return dict(ROW.findall(output))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
