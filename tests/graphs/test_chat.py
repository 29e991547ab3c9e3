"""`sangam chat` against a small HTTP server that streams like Dynamo's frontend."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from graphs.__main__ import main
from graphs.chat import Answer


class Server(ThreadingHTTPServer):
    daemon_threads = True
    requests: list[dict[str, Any]]
    refusal: str = ""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._reply("application/json", json.dumps({"object": "list", "data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        if self.server.refusal:
            self._reply("application/json", json.dumps({"message": self.server.refusal}), 400)
            return
        events = [self._chunk(text, finish, n) for text, finish, n in (("7 8", None, 2), (" 9", "stop", 3))]
        self._reply("text/event-stream", "".join(f"data: {event}\n\n" for event in (*events, "[DONE]")))

    def _chunk(self, text: str, finish: str | None, num_tokens: int) -> str:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
        usage = {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": num_tokens + 1}
        kind = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
        return json.dumps({**kind, "choices": [choice], "usage": usage})

    def _reply(self, kind: str, body: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.requests = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def chat(monkeypatch: pytest.MonkeyPatch, server: Server, stdin: str, *flags: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    return main(["chat", "--url", f"http://127.0.0.1:{server.server_port}", *flags])


def test_piped_lines_are_answered_one_by_one(
    monkeypatch: pytest.MonkeyPatch, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, server, "count from 7 to 9\n\nagain\n") == 0
    assert capsys.readouterr().out == "7 8 9\n7 8 9\n"
    assert [r["messages"] for r in server.requests] == [
        [{"role": "user", "content": "count from 7 to 9"}],
        [{"role": "user", "content": "again"}],
    ]


def test_only_given_options_are_sent(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    chat(monkeypatch, server, "a\n")
    chat(
        monkeypatch, server, "a\n", "--max-tokens", "8", "--seed", "1", "--block-length", "16", "--unmasking", "margin"
    )
    plain, full = server.requests
    assert plain.keys() == {"messages", "model", "stream", "stream_options"}
    assert (full["max_tokens"], full["seed"]) == (8, 1)
    assert full["nvext"] == {"annotations": ["dllm.unmasking:margin", "dllm.block_length:16"]}


def test_a_refusal_is_one_line(
    monkeypatch: pytest.MonkeyPatch, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refusal = "prompt + canvas\nis too long"
    assert chat(monkeypatch, server, "a\n") == 1
    assert capsys.readouterr().err == "sangam chat: HTTP 400: prompt + canvas is too long\n"


def test_no_server_is_one_line(
    monkeypatch: pytest.MonkeyPatch, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("sangam chat: no server at http://127.0.0.1:1 (")


def test_masked_positions_of_the_current_block_are_shown() -> None:
    assert Answer().masked(32) == "░" * 3 * 32
    assert Answer(text="one two ", num_tokens=2).masked(32) == "░" * 4 * 30
    assert Answer(text="one two ", num_tokens=2, finish_reason="stop").masked(32) == ""


def test_footer_gives_the_rate() -> None:
    answer = Answer(num_tokens=10)
    answer.started -= 2.0
    assert answer.footer().startswith("10 tokens, 2.0 s, ")
