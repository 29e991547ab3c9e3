"""`serve` as a process of its own, with stand-ins for Dynamo's frontend and for a worker."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

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
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ERROR stubborn', flush=True);" + WORKER
# What `sangam serve` does, but for the programs of the graph.
SERVE = """
import sys
from pathlib import Path
from graphs import local, __main__
from graphs.program import Program
folder, port, status, worker = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
(folder / "model").mkdir()
(folder / "model" / "config.json").write_text("{}")
def stages(settings, nats_url, discovery_dir, ports):
    (folder / "discovery").write_text(discovery_dir)
    frontend = (sys.executable, "-c", %r, port, status)
    return [[Program("worker.0", (sys.executable, "-c", worker), {}, settings.url)],
            [Program("frontend", frontend, {}, settings.url)]]
local.stages = stages
sys.exit(__main__.main(["serve", "colocated", "--model", str(folder / "model"), "--http-port", port,
    "--served-model-name", "tiny", "--log-dir", str(folder / "logs"), *sys.argv[5:]]))
"""


class Served:
    """A running `serve` and what it printed."""

    def __init__(self, folder: Path, *flags: str, status: int = 200, worker: str = WORKER) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.folder, self._output = folder, folder / "output"
        arguments = [str(folder), str(port), str(status), worker, *flags]
        with self._output.open("wb") as output:
            script = textwrap.dedent(SERVE % FRONTEND)
            self.process = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=output, stderr=output)

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
