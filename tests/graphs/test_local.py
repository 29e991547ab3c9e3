"""`serve` as a process of its own, with stand-ins for Dynamo's frontend and for a worker."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from graphs.__main__ import main

PATIENCE_S = 25.0
FRONTEND = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, body, status=200):
        self.send_response(status); self.end_headers(); self.wfile.write(json.dumps(body).encode())
    def do_GET(self): self.reply({"data": [{"id": "tiny"}]})
    def do_POST(self): self.reply({}, int(sys.argv[2]))
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
WORKER = "import time; print('INFO loading'); print('ERROR a bad day', flush=True); time.sleep(60)"
# Leaves when it is drained, as workers do.
DRAINABLE = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
    def do_POST(self): self.do_GET(); self.wfile.flush(); os._exit(0)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ERROR stubborn', flush=True);" + WORKER
# What `sangam serve` does, but for the programs of the graph.
SERVE = """
import sys
from pathlib import Path
from graphs import local, __main__
from graphs.program import Program
folder, port, status, worker, worker_port = Path(sys.argv[1]), *sys.argv[2:6]
(folder / "model").mkdir()
(folder / "model" / "config.json").write_text("{}")
def stages(settings, nats_url, discovery_dir, home, ports):
    (folder / "home").write_text(home)
    (folder / "discovery").write_text(discovery_dir)
    frontend = (sys.executable, "-c", %r, port, status)
    worker_url = f"http://127.0.0.1:{worker_port}" if worker_port else settings.url
    return [[Program("worker.0", (sys.executable, "-c", worker, worker_port), {}, worker_url, may_leave=True)],
            [Program("frontend", frontend, {}, settings.url)]]
local.stages = stages
sys.exit(__main__.main(["serve", "colocated", "--model", str(folder / "model"), "--http-port", port,
    "--served-model-name", "tiny", "--log-dir", str(folder / "logs"), *sys.argv[6:]]))
"""


class Served:
    """A running `serve` and what it printed."""

    def __init__(
        self, folder: Path, *flags: str, status: int = 200, worker: str = WORKER, home: Path | None = None
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
            port, worker_port = server.getsockname()[1], other.getsockname()[1]
        self.folder, self._output = folder, folder / "output"
        arguments = [str(folder), str(port), str(status), worker]
        arguments += [str(worker_port) if worker == DRAINABLE else "", *flags]
        with self._output.open("wb") as output:
            script = textwrap.dedent(SERVE % FRONTEND)
            self.process = subprocess.Popen(
                [sys.executable, "-c", script, *arguments],
                stdout=output,
                stderr=output,
                env={**os.environ, "XDG_STATE_HOME": str(folder / "state"), "HOME": str(home or folder)},
            )

    def output(self) -> str:
        return self._output.read_text()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.output():
            assert time.monotonic() < deadline and self.process.poll() is None, self.output()
            time.sleep(0.05)

    def exit_status(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_tells_where_the_model_answers_and_stops_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    served = Served(tmp_path)
    try:
        served.wait_for("ERROR a bad day")
        served.wait_for("Ctrl-C stops everything")
        served.process.send_signal(number)
    finally:
        status = served.exit_status()
    output = served.output()
    assert status == 0
    assert "tiny answers at http://127.0.0.1:" in output
    assert "curl http://127.0.0.1:" in output
    assert "ERROR a bad day" in output and "INFO loading" not in output
    assert f"{number.name}: stopping" in output
    assert "INFO loading" in (tmp_path / "logs" / "worker.0.log").read_text()
    assert not Path((tmp_path / "discovery").read_text()).exists()


def test_verbose_shows_everything(tmp_path: Path) -> None:
    served = Served(tmp_path, "--verbose")
    try:
        served.wait_for("INFO loading")
    finally:
        served.process.send_signal(signal.SIGINT)
        served.exit_status()


def test_a_failed_start_shows_who_and_the_end_of_its_log(tmp_path: Path) -> None:
    served = Served(tmp_path, worker="print('reading weights'); raise SystemExit('no weights in there')")
    assert served.exit_status() == 1
    output = served.output()
    assert "worker.0 exited with 1 while starting" in output
    assert "reading weights" in output and "no weights in there" in output
    assert str(tmp_path / "logs" / "worker.0.log") in output


def test_a_model_that_answers_with_errors_is_a_failed_start(tmp_path: Path) -> None:
    served = Served(tmp_path, status=500)
    assert served.exit_status() == 1
    assert "does not answer: HTTP 500" in served.output()


def test_interrupted_while_starting(tmp_path: Path) -> None:
    served = Served(tmp_path, status=503)
    try:
        served.wait_for("frontend")
        served.process.send_signal(signal.SIGINT)
    finally:
        assert served.exit_status() == 128 + signal.SIGINT


def test_a_nats_server_that_is_not_there_is_a_failed_start(tmp_path: Path) -> None:
    served = Served(tmp_path, "--nats", "nats://127.0.0.1:1")
    assert served.exit_status() == 1
    assert "nothing listens at nats://127.0.0.1:1" in served.output()


def test_a_second_signal_kills_who_does_not_stop(tmp_path: Path) -> None:
    served = Served(tmp_path, worker=STUBBORN)
    try:
        served.wait_for("ERROR stubborn")
        served.wait_for("Ctrl-C stops everything")
        served.process.send_signal(signal.SIGINT)
        served.wait_for("SIGINT: stopping")
        started = time.monotonic()
        served.process.send_signal(signal.SIGINT)
    finally:
        status = served.exit_status()
    assert status == 128 + signal.SIGINT
    assert time.monotonic() - started < 9.0  # the grace period is ten seconds


def test_a_drained_worker_leaves_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    served = Served(tmp_path, worker=DRAINABLE)
    try:
        served.wait_for("Ctrl-C stops everything")
        assert main(["drain", "router"]) == 2
        assert "there is no router: colocated (--http-port" in capsys.readouterr().err
        assert main(["drain", "worker.0", "--timeout-s", str(PATIENCE_S)]) == 0
        assert "✓ worker.0 drained and left" in capsys.readouterr().out
        served.wait_for("✓ worker.0 drained and left")
        assert main(["drain", "worker.0"]) == 2
        assert "has no workers left" in capsys.readouterr().err
    finally:
        served.process.send_signal(signal.SIGINT)
        status = served.exit_status()
    assert status == 0
    assert served.output().count("drained and left") == 1 and "next try" not in served.output()
    assert list((tmp_path / "state" / "sangam").glob("*")) == []


def test_a_state_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("no folder")
    served = Served(tmp_path)
    try:
        served.wait_for("Ctrl-C stops everything")
        assert "cannot write" in served.output()
    finally:
        served.process.send_signal(signal.SIGINT)
        assert served.exit_status() == 0


def test_frontends_get_a_home_that_they_can_write_to(tmp_path: Path) -> None:
    """Else they would never serve the model: Dynamo copies its tokenizer to ~/.cache."""
    no_home = tmp_path / "file"
    no_home.write_text("")
    for i, (home, is_usable) in enumerate([(tmp_path, True), (no_home, False)]):
        folder = tmp_path / str(i)
        folder.mkdir()
        served = Served(folder, home=home)
        try:
            served.wait_for("Ctrl-C stops everything")
            given = Path((folder / "home").read_text())
            assert (given == home) is is_usable and given.is_dir()
        finally:
            served.process.send_signal(signal.SIGINT)
            assert served.exit_status() == 0
        assert given.exists() is is_usable
