"""`sangam generate`: what it writes, what it says, and what a kill leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.config import DEMO_MODELS
from graphs.__main__ import main
from tests.e2e.reference import Reference

ROOT = Path(__file__).resolve().parents[2]
SLOW = ("--unmasking", "quota", "--max-tokens", "32")
"""32 steps for every answer."""


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(DEMO_MODELS["demo"])


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "graphs", "generate", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command in this process: exit status, stdout and stderr."""
    piped = tmp_path / "piped"

    def run(*arguments: object, stdin: str = "") -> tuple[int, str, str]:
        capfd.readouterr()
        piped.write_text(stdin)
        monkeypatch.setattr(sys, "stdout", sys.__stdout__)  # capfd's has no descriptor of its own
        with piped.open() as opened:
            monkeypatch.setattr(sys, "stdin", opened)
            status = main(["generate", *map(str, arguments)])
        return (status, *capfd.readouterr())

    return run


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def chats(*prompts: str, **options: Any) -> str:
    """Lines of a batch file."""
    found = ({"custom_id": f"q{i}", "messages": [{"role": "user", "content": text}]} for i, text in enumerate(prompts))
    return "".join(json.dumps({**line, **options}) + "\n" for line in found)


def test_a_mixed_file(run: Run, tmp_path: Path, reference: Reference) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "any", "prompt": "<|user|>spell pear<|assistant|>", "max_tokens": 16}
    lines = [
        chats("count from 7 to 40").strip(),
        json.dumps({"custom_id": "q0", "prompt": "<|user|>héllo 🦀<|assistant|>", "temperature": 0.9, "seed": 4}),
        "",
        "{not json",
        json.dumps({"custom_id": "batch", "method": "POST", "url": "/v1/completions", "body": body}),
        json.dumps({"custom_id": "bad", "prompt": "x", "max_tokens": 0}),
        '{"prompt": "' + "x " * 3_000_000 + '"}',
        json.dumps({"prompt": "x " * 2000, "custom_id": "long"}),
    ]
    source.write_text("\n".join(lines))
    status, out, err = run(source, target)
    assert (status, out) == (1, "")
    assert "7 requests, 4 failed; " in err and "tokens/forward" in err
    found = {record["index"]: record for record in records(target)}
    assert sorted(found) == [0, 1, 3, 4, 5, 6, 7]
    for index, prompt, params in (
        (0, "count from 7 to 40", {}),
        (1, "héllo 🦀", {"temperature": 0.9, "seed": 4}),
        (4, "spell pear", {"max_tokens": 16}),
    ):
        expected = reference.chat(prompt, **params)  # type: ignore[arg-type]
        answer = found[index]
        assert (answer["text"], answer["num_tokens"]) == (expected.text, len(expected.tokens))
        assert (answer["finish_reason"], answer["num_forwards"]) == (expected.finish_reason, expected.num_steps)
    assert [found[i].get("custom_id") for i in (0, 1, 3, 4, 5)] == ["q0", "q0", None, "batch", "bad"]
    assert found[5]["error"] == "max_tokens=0 is out of range; allowed: a whole number of at least 1"
    assert "too long" in found[6]["error"] and "over the context length of 2048 tokens" in found[7]["error"]

    source.write_text(source.read_text().replace('"max_tokens": 0', '"max_tokens": 5'))
    status, _, err = run(source, target)
    assert "4 requests, 3 failed" in err and "(3 were answered before)" in err and status == 1
    assert sorted(record["index"] for record in records(target)) == [0, 1, 3, 4, 5, 6, 7]


def test_a_pipe_is_answered_while_it_is_open(tmp_path: Path, reference: Reference) -> None:
    """Whoever writes it may want an answer before the next question, or stop it with nothing to read."""
    process = subprocess.Popen(
        [sys.executable, "-m", "graphs", "generate", "-", "-"],
        cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    for prompt in ("spell pear", "what is 31 plus 7?"):
        process.stdin.write(chats(prompt))
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["text"] == reference.chat(prompt).text
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "answers so far were written" in err


def test_ctrl_c_in_the_middle_of_a_line_that_a_pipe_does_not_end() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "graphs", "generate", "-", "-"],
        cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(chats("spell pear") + '{"prompt')
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["text"] == "p e a r"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stderr is not None and "Traceback" not in (err := process.stderr.read()), err
    process.communicate()


def test_a_closed_stdin_is_said_so() -> None:
    command = f"exec {sys.executable} -m graphs generate - - <&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, text=True, capture_output=True)
    assert (done.returncode, done.stderr.splitlines()) == (
        2, ["sangam generate: stdin is closed; give a file or something to read from"],
    )  # fmt: skip


def test_a_closed_stdout_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(chats("spell pear"))
    command = f"exec {sys.executable} -m graphs generate {tmp_path}/in.jsonl - >&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, text=True, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr.splitlines()) == (
        2, ["sangam generate: stdout is closed; name a file for the answers"],
    )  # fmt: skip


def test_a_named_pipe_is_read_once_as_stdin_is(run: Run, tmp_path: Path) -> None:
    pipe, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", 'printf %s "$1" > "$0"', str(pipe), chats("spell pear")]):
        assert run(pipe, target)[0] == 0
    assert [record["text"] for record in records(target)] == ["p e a r"]


def waiting_for(path: Path, num_lines: int, process: subprocess.Popen[str]) -> None:
    while not path.exists() or path.read_bytes().count(b"\n") < num_lines:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def test_kill_9_loses_no_answer_and_a_later_run_finishes(run: Run, tmp_path: Path, reference: Reference) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [f"count from {i % 10} to {20 + i}" for i in range(30)]
    source.write_text(chats(*prompts))
    process = start(source, target, "--max-num-seqs", 4, *SLOW)
    waiting_for(target, 5, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    num_whole = len([json.loads(line) for line in target.read_bytes().splitlines(keepends=True) if line[-1:] == b"\n"])
    assert 5 <= num_whole < 30
    with target.open("ab") as file:
        file.write(b'{"index": 29, "text": "torn')
    status, _, err = run(source, target, *SLOW)
    assert status == 0 and f"({num_whole} were answered before)" in err
    found = records(target)
    assert sorted(record["index"] for record in found) == list(range(30))
    for record in found:
        expected = reference.chat(prompts[record["index"]], 32, unmasking="quota", steps_per_block=32)
        assert record["text"] == expected.text and record["custom_id"] == f"q{record['index']}"


def test_ctrl_c_ends_it_between_two_answers(run: Run, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(chats(*(f"count from {i % 10} to {20 + i}" for i in range(60))))
    process = start(source, target, "--max-num-seqs", 2, *SLOW)
    try:
        waiting_for(target, 1, process)
        status, _, err = run(source, target, *SLOW)
        assert status == 2 and "is being written by another process" in err
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert err.strip().endswith("sangam generate: interrupted; the same command goes on from here")
    assert target.read_bytes().endswith(b"\n") and 1 <= len(records(target)) < 60


def test_streams_and_text_files(run: Run, tmp_path: Path, reference: Reference) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text("spell pear\n\n  \nwhat is 31 plus 7?\n")
    status, out, _ = run(source, "-")
    found = {record["index"]: record["text"] for record in map(json.loads, out.splitlines())}
    assert status == 0
    assert found == {0: reference.chat("spell pear").text, 3: reference.chat("what is 31 plus 7?").text}
    target = tmp_path / "out.jsonl"
    status, out, _ = run("-", target, stdin=chats("spell pear", stop="e"))
    assert (status, out, records(target)[0]["text"]) == (0, "", "p ")
    assert run("-", target, stdin=chats("spell pear"))[::2] == (
        2,
        f"sangam generate: {target} holds answers already: only a run whose input is a file can be resumed\n",
    )


def test_an_empty_file(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.touch()
    status, _, err = run(source, tmp_path / "out.jsonl")
    assert status == 0 and "0 requests, 0 failed" in err and (tmp_path / "out.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("source", "target", "flags", "message"),
    [
        ("nowhere.jsonl", "out.jsonl", (), "nowhere.jsonl: No such file"),
        ("in.jsonl", "no/out.jsonl", (), "out.jsonl: No such file"),
        ("in.jsonl", "in.jsonl", (), "in.jsonl is the input, too"),
        ("in.jsonl", "text.jsonl", (), "text.jsonl line 1 is no answer of an earlier run"),
        ("in.jsonl", "other.jsonl", (), "answers another input: line 1 is 'somebody' there, 'q0' in"),
        ("in.jsonl", "more.jsonl", (), "answers another input: .* has no line 6"),
        ("in.jsonl", "out.jsonl", ("--model", "nowhere"), "nowhere"),
        ("in.jsonl", "out.jsonl", ("--kv-cache-tokens", "0"), "kv_cache_tokens"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_2(
    run: Run, source: str, target: str, flags: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text(chats("spell pear"))
    (tmp_path / "text.jsonl").write_text("hello\n")
    other = '{"index": 0, "custom_id": "somebody", "text": ""}\n{"index": 1, "error": "no"}\n{"index": 2, "te'
    (tmp_path / "other.jsonl").write_text(other)
    (tmp_path / "more.jsonl").write_text('{"index": 5, "text": ""}\n')
    status, out, err = run(tmp_path / source, tmp_path / target, *flags)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert re.search(message, err), err
    assert (tmp_path / "other.jsonl").read_text() == other, "no error line and no torn one is taken out of it"


def test_nobody_reads(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(chats("spell pear"))
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "__stdout__", pipe)
        status, _, err = run(source, "-")
    assert status == 1 and "nobody reads the answers any more" in err
