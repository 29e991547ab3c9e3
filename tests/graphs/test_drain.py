"""`sangam drain` against a worker that is only a status port, and files that say where it is."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from graphs import drain
from graphs.__main__ import main
from graphs.drain import NotDrainable
from graphs.state import Process, RunningGraph, StateFile


class FakeWorker:
    """Answers a drain as Dynamo's status server does, and calls `on_drain`."""

    def __init__(self) -> None:
        self.drains: list[object] = []
        self.status = 200
        self.on_drain: Callable[[], None] = lambda: None
        self.open(0)

    def open(self, port: int) -> None:
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                worker.drains.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                status, body = worker.status, b'{"status": "draining"}'
                if self.path != "/engine/drain":
                    status, body = 404, b'{"error": "Route not found"}'
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)
                worker.on_drain()

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        """Refuses connections from now on."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Later:
    """Calls, each in a thread of its own and some time from now; joined at the end."""

    def __init__(self) -> None:
        self._timers: list[threading.Timer] = []

    def __call__(self, delay_s: float, call: Callable[[], None]) -> None:
        self._timers.append(threading.Timer(delay_s, call))
        self._timers[-1].start()

    def join(self) -> None:
        for timer in self._timers:
            timer.join()


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(drain, "INTERVAL_S", 0.02)


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    worker = FakeWorker()
    yield worker
    worker.close()


@pytest.fixture
def later() -> Iterator[Later]:
    later = Later()
    yield later
    later.join()


@pytest.fixture
def file(worker: FakeWorker) -> Iterator[StateFile]:
    """Of a graph that has the worker as prefill_worker.0."""
    file = StateFile(graph("hybrid", 8000, worker.url))
    yield file
    file.close()


def graph(kind: str, port: int, url: str = "http://127.0.0.1:1") -> RunningGraph:
    processes = {"frontend": Process(f"http://127.0.0.1:{port}", False), "router": Process(f"{url}0", False)}
    worker = "colocated_worker.0" if kind == "colocated" else "prefill_worker.0"
    return RunningGraph(kind, port, port, processes | {worker: Process(url, True)})


def output(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_by_name_it_waits_until_serve_has_seen_the_worker_leave(
    worker: FakeWorker, file: StateFile, later: Later, capsys: pytest.CaptureFixture[str]
) -> None:
    left: list[str] = []

    def forget() -> None:
        left.append("prefill_worker.0")
        file.forget("prefill_worker.0")

    def end() -> None:
        worker.close()  # the port closes first, the process ends later
        later(0.3, forget)

    worker.on_drain = lambda: later(0.1, end)
    assert main(["drain", "prefill_worker.0"]) == 0
    assert left and worker.drains == [{}]
    assert "✓ prefill_worker.0 drained and left" in output(capsys)


def test_by_url_it_waits_until_the_port_is_closed(
    worker: FakeWorker, later: Later, capsys: pytest.CaptureFixture[str]
) -> None:
    worker.on_drain = lambda: later(0.2, worker.close)
    assert main(["drain", f"{worker.url}/health"]) == 0
    assert f"✓ {worker.url} drained and left" in output(capsys)


def test_a_graph_that_ends_meanwhile_ends_the_wait(worker: FakeWorker, file: StateFile, later: Later) -> None:
    worker.on_drain = lambda: later(0.1, file.close)
    assert main(["drain", "prefill_worker.0"]) == 0


def test_a_worker_that_dies_and_comes_back_has_not_left(
    worker: FakeWorker, file: StateFile, later: Later, capsys: pytest.CaptureFixture[str]
) -> None:
    def restart() -> None:
        worker.close()
        later(0.8, lambda: worker.open(worker.port))

    worker.on_drain = lambda: later(0.0, restart)
    assert main(["drain", "prefill_worker.0"]) == 1
    assert "died before it was done" in output(capsys)


def test_no_wait(worker: FakeWorker, file: StateFile, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "prefill_worker.0", "--no-wait"]) == 0
    assert worker.drains == [{}]
    assert output(capsys) == "✓ prefill_worker.0 drains\n"


def test_patience_ends(worker: FakeWorker, file: StateFile, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "prefill_worker.0", "--timeout-s", "0.1"]) == 1
    assert "prefill_worker.0 has not left after 0.1 s" in output(capsys)


def test_ctrl_c_ends_the_wait_not_the_drain(
    worker: FakeWorker, file: StateFile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(drain, "wait", interrupted)
    assert main(["drain", "prefill_worker.0"]) == 130
    assert "prefill_worker.0 goes on draining" in output(capsys)


def test_a_worker_that_refuses(worker: FakeWorker, file: StateFile, capsys: pytest.CaptureFixture[str]) -> None:
    worker.status = 500
    assert main(["drain", "prefill_worker.0"]) == 1
    assert "refuses: HTTP 500" in output(capsys)


def test_a_worker_that_is_not_there(worker: FakeWorker, file: StateFile, capsys: pytest.CaptureFixture[str]) -> None:
    worker.close()
    for name in ("prefill_worker.0", worker.url.removeprefix("http://")):
        assert main(["drain", name]) == 1
        assert f"prefill_worker.0 at {worker.url} does not answer" in output(capsys)


def test_what_answers_but_is_no_worker(worker: FakeWorker, capsys: pytest.CaptureFixture[str]) -> None:
    worker.status = 404
    assert main(["drain", worker.url]) == 2
    assert "is no worker" in output(capsys)


@pytest.mark.parametrize("url", ["http://here:there", "ftp://here:21", "http://[::1"])
def test_what_is_no_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", url]) == 2
    assert "is no URL" in output(capsys)


def test_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "prefill_worker.0"]) == 2
    assert "no graph is up on this machine" in output(capsys)


HYBRID, OTHER, COLOCATED = graph("hybrid", 8000), graph("hybrid", 8100, "http://127.0.0.1:2"), graph("colocated", 8200)
DISAGGREGATED = graph("disaggregated", 8000, "http://127.0.0.1:3")


@pytest.mark.parametrize(
    ("name", "kind", "port", "running", "url"),
    [
        ("prefill_worker.0", None, None, [HYBRID], "http://127.0.0.1:1"),
        ("prefill_worker.0", None, None, [HYBRID, COLOCATED], "http://127.0.0.1:1"),
        ("prefill_worker.0", None, 8100, [HYBRID, OTHER], "http://127.0.0.1:2"),
        ("prefill_worker.0", "disaggregated", None, [HYBRID, DISAGGREGATED], "http://127.0.0.1:3"),
        ("prefill_worker.0", "hybrid", 8100, [HYBRID, OTHER, DISAGGREGATED], "http://127.0.0.1:2"),
        ("http://10.0.0.1:9090", None, None, [], "http://10.0.0.1:9090"),
        ("host:9090", None, None, [HYBRID, OTHER], "http://host:9090"),
    ],
)
def test_which_worker_is_meant(
    name: str, kind: str | None, port: int | None, running: Sequence[RunningGraph], url: str
) -> None:
    assert drain.find(name, kind, port, running).status_url == url


@pytest.mark.parametrize(
    ("name", "port", "running", "message"),
    [
        ("prefill_worker.0", None, [HYBRID, OTHER], r"one: hybrid \(--http-port 8000\), hybrid \(--http-port 8100\)"),
        ("prefill_worker.0", 9000, [HYBRID], r"no such graph; on this machine run hybrid \(--http-port 8000\)"),
        ("prefil.0", None, [HYBRID], r"no prefil.0: hybrid \(--http-port 8000\) has prefill_worker.0"),
        ("prefil.0", None, [HYBRID, COLOCATED], "has prefill_worker.0; colocated .* has colocated_worker.0"),
        ("router", None, [HYBRID], "router cannot be drained, only workers can: prefill_worker.0"),
        ("frontend", None, [HYBRID], "frontend cannot be drained"),
        ("http://127.0.0.1:8000/v1", None, [HYBRID], "frontend cannot be drained"),
    ],
)  # fmt: skip
def test_what_cannot_be_drained(name: str, port: int | None, running: Sequence[RunningGraph], message: str) -> None:
    with pytest.raises(NotDrainable, match=message):
        drain.find(name, None, port, running)


def test_a_url_of_this_machine_s_worker_is_that_worker() -> None:
    assert drain.find("127.0.0.1:1", None, None, [HYBRID]) == drain.find("prefill_worker.0", None, None, [HYBRID])
