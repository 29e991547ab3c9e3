"""Where the answers of a batch go: a JSON object per line, so that a killed run can be resumed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from components.offline import Answer

_BEGINNING = b'{"index": '
"""Of every line that a run writes."""


class NotResumableError(ValueError):
    """The file is none that a run could go on with; it has not been touched."""


class AnswersFile:
    """Appends answers; knows those that an earlier run has written.

    `repair` cuts away a last line that was torn by a kill, and takes out lines with an error, to be tried
    again. A pipe or a device is only written to.

    Attributes:
        answered: index -> custom_id of what is answered.

    Raises:
        NotResumableError: it holds something else than answers, or another process writes to it.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answered: dict[int, str | None] = {}
        self._num_errors = self._num_torn_bytes = 0
        self._file = self._open()
        try:
            self._lock()
            if stat.S_ISREG(os.fstat(self._file).st_mode):
                self._read()
        except BaseException:
            os.close(self._file)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.fstat(self._file), os.stat(self.path))
        except (BlockingIOError, FileNotFoundError):
            is_there = False
        if not is_there:  # another process has it, or has just put another file in its place
            raise NotResumableError(f"{self.path} is being written by another process")

    def _read(self) -> None:
        with self.path.open("rb") as old:
            for number, line in enumerate(old, 1):
                if not line.endswith(b"\n"):
                    if not line.startswith(_BEGINNING[: len(line)]):
                        raise self._stranger(number)
                    self._num_torn_bytes = len(line)
                    break
                record = self._record(number, line)
                if "error" in record:
                    self._num_errors += 1
                else:
                    self.answered[record["index"]] = record.get("custom_id")

    def repair(self) -> None:
        """Makes the file ready to be appended to; until then it is as it was."""
        if self._num_torn_bytes:
            os.ftruncate(self._file, os.fstat(self._file).st_size - self._num_torn_bytes)
        if self._num_errors:
            self._take_errors_out()

    def _take_errors_out(self) -> None:
        target = self.path.resolve()  # a link stays one
        kept = target.with_name(f"{target.name}.tmp")
        with self.path.open("rb") as old, kept.open("wb") as new:
            new.writelines(line for line in old if "error" not in json.loads(line))
        shutil.copymode(target, kept)
        os.replace(kept, target)
        os.close(self._file)
        self._file = self._open()
        self._lock()

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)

    def _record(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
            if isinstance(record["index"], int) and ("error" in record or isinstance(record["text"], str)):
                return dict(record)
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise self._stranger(number)

    def _stranger(self, number: int) -> NotResumableError:
        return NotResumableError(f"{self.path} line {number} is no answer of an earlier run; choose another output")

    def write(self, answer: Answer) -> None:
        """All of it or, if the process is killed in just this moment, a line that has no end."""
        write_all(self._file, encode(answer))

    def __enter__(self) -> AnswersFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        os.close(self._file)


class AnswersStream:
    """The same to stdout, where nothing was before."""

    answered: dict[int, str | None] = {}

    def repair(self) -> None:
        pass

    def write(self, answer: Answer) -> None:
        write_all(sys.stdout.fileno(), encode(answer))

    def __enter__(self) -> AnswersStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        pass


def write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def encode(answer: Answer) -> bytes:
    """A line of the file."""
    record: dict[str, Any] = {"index": answer.index}
    if answer.custom_id is not None:
        record["custom_id"] = answer.custom_id
    if answer.error:
        record["error"] = answer.error
    else:
        record |= {
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "num_tokens": len(answer.tokens),
            "num_prompt_tokens": answer.num_prompt_tokens,
            "num_forwards": answer.num_forwards,
        }
    try:
        return f"{json.dumps(record, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:  # a custom_id of half a character
        return f"{json.dumps(record)}\n".encode()
