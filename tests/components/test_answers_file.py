from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from components.answers_file import AnswersFile, NotResumableError, encode
from components.offline import Answer


def answer(index: int, name: str | None = None, text: str = "ok") -> Answer:
    return Answer(index, name, text, [5, 6], "stop", 3, 4)


def failure(index: int) -> Answer:
    return Answer(index, error="max_tokens=0 is out of range")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def write(path: Path, *answers: Answer) -> None:
    with AnswersFile(path) as file:
        file.repair()
        for one in answers:
            file.write(one)


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record(path: Path) -> None:
    write(path, answer(7, "a", "naïve 🦀"), failure(8))
    assert records(path) == [
        {
            "index": 7,
            "custom_id": "a",
            "text": "naïve 🦀",
            "finish_reason": "stop",
            "num_tokens": 2,
            "num_prompt_tokens": 3,
            "num_forwards": 4,
        },
        {"index": 8, "error": "max_tokens=0 is out of range"},
    ]
    assert "🦀" in path.read_text()


def test_half_a_character_in_a_custom_id_is_written_as_it_came() -> None:
    assert json.loads(encode(answer(0, "\ud83e")))["custom_id"] == "\ud83e"


def test_a_later_run_knows_what_is_answered_and_appends(path: Path) -> None:
    write(path, answer(3, "c"), answer(0))
    with AnswersFile(path) as file:
        file.repair()
        assert file.answered == {3: "c", 0: None}
        file.write(answer(1))
    assert [record["index"] for record in records(path)] == [3, 0, 1]


@pytest.mark.parametrize("num_left", [1, 10, 60])
def test_a_torn_last_line_is_cut_away(path: Path, num_left: int) -> None:
    write(path, answer(0), answer(1))
    whole = encode(answer(0))
    path.write_bytes(whole + encode(answer(1))[:num_left])
    with AnswersFile(path) as file:
        file.repair()
        assert file.answered == {0: None}
        assert path.read_bytes() == whole
        file.write(answer(1))
    assert [record["index"] for record in records(path)] == [0, 1]


def test_errors_are_taken_out_to_be_tried_again(path: Path) -> None:
    write(path, failure(0), answer(1), failure(2), answer(3))
    path.write_bytes(path.read_bytes() + b'{"index": 4, "te')
    with AnswersFile(path) as file:
        file.repair()
        assert file.answered == {1: None, 3: None}
        file.write(answer(0))
    assert [record["index"] for record in records(path)] == [1, 3, 0]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "text", ["hello\n", "[1]\n", '{"prompt": "x"}\n', '{"index": "0", "text": ""}\n', '{"index": 0}\n', "\xff\n"]
)
def test_a_file_that_is_something_else_is_left_alone(path: Path, text: str) -> None:
    before = encode(answer(0)) + text.encode("latin-1")
    path.write_bytes(before)
    with pytest.raises(NotResumableError, match="answers.jsonl line 2 is no answer of an earlier run"):
        AnswersFile(path)
    assert path.read_bytes() == before


def test_two_runs_do_not_write_to_one_file(path: Path) -> None:
    with AnswersFile(path), pytest.raises(NotResumableError, match="is being written by another process"):
        AnswersFile(path)
    write(path, failure(0))
    with AnswersFile(path), pytest.raises(NotResumableError, match="is being written by another process"):
        AnswersFile(path)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        AnswersFile(tmp_path)
    with pytest.raises(FileNotFoundError):
        AnswersFile(tmp_path / "no" / "where")


@pytest.mark.parametrize("content", ['{"config": 1}', "one line of somebody's notes"])
def test_a_file_of_somebody_else_without_an_end_of_line_is_not_cut(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(NotResumableError, match="line 1 is no answer of an earlier run"):
        AnswersFile(path)
    assert path.read_text() == content


def test_a_pipe_is_not_read(path: Path) -> None:
    """Nobody else has it open: a read would wait for ever."""
    os.mkfifo(path)
    with AnswersFile(path) as file:
        file.repair()
        assert not file.answered
        file.write(answer(0))


def test_a_link_and_the_mode_stay_when_errors_are_taken_out(path: Path) -> None:
    write(path, answer(0), failure(1))
    path.chmod(0o600)
    link = path.with_name("link.jsonl")
    link.symlink_to(path)
    write(link, answer(1))
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o600
    assert [record["index"] for record in records(path)] == [0, 1]


def test_a_file_that_was_replaced_meanwhile_is_not_written_to(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another run, between the opening and the lock: what went into the old file would be lost."""
    write(path, answer(0))
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    lock = AnswersFile._lock

    def late(self: AnswersFile) -> None:
        other.replace(path)
        lock(self)

    monkeypatch.setattr(AnswersFile, "_lock", late)
    with pytest.raises(NotResumableError, match="is being written by another process"):
        AnswersFile(path)
