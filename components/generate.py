"""`sangam generate`: a file of prompts through the engine of this process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, BinaryIO

from backend.core.sampling_params import InvalidRequestError
from backend.core.scheduler import SchedulerConfig
from backend.engine.engine import Engine
from backend.models.config import CheckpointError
from components.answers_file import AnswersFile, AnswersStream, NotResumableError
from components.batch_lines import arriving, custom_id, lines, parse_line, plain_fields, read_fields
from components.checkpoint import engine_config, model_card
from components.config import ColocatedWorkerConfig, RouterConfig
from components.generate_progress import GenerateProgress, Totals
from components.offline import Answer, Job, OfflineBatch
from components.protocol import ModelCard
from components.request_parser import Limits, build_request
from components.text import TextProcessor

STREAM = "-"


class BatchError(ValueError):
    """The batch cannot be run as asked; the message says why."""


def run(
    source: str, target: str, worker: ColocatedWorkerConfig, router: RouterConfig, defaults: Mapping[str, Any]
) -> int:
    """Answers every line of `source` that `target` does not answer yet; the exit status.

    0: all lines are answered. 1: some failed, and say why. 2: nothing could be done.
    128 + signal: interrupted; the same command goes on.

    Args:
        source, target: paths, or "-" for stdin and stdout.
        router: what it accepts is accepted here.
        defaults: options of lines that do not name them.
    """
    is_resumable = target != STREAM and not _is_stream(source)
    try:
        with _Interrupt() as interrupt, _opened(source) as stream, _answers(source, target) as answers:
            num_lines = _survey(source, answers)
            answers.repair()
            engine, text, card = _load(worker)
            jobs = _jobs(stream, source, answers.answered, text, card, Limits.of(router, card), defaults)
            with GenerateProgress(num_lines, len(answers.answered)) as progress:
                totals = _answer(OfflineBatch(engine, text.tokenizer, jobs), answers, progress, interrupt)
            before = f" ({len(answers.answered):,} were answered before)" if answers.answered else ""
            progress.say(f"{totals.summary()}{before}")
    except (BatchError, NotResumableError, CheckpointError) as error:
        return _failed(str(error), 2)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            return _failed("nobody reads the answers any more", 1)
        return _failed(f"{error.filename or target}: {error.strerror}", 2)
    if interrupt.number:
        how = "the same command goes on from here" if is_resumable else "answers so far were written"
        return _failed(f"interrupted; {how}", 128 + interrupt.number)
    return 1 if totals.num_failures else 0


def _failed(reason: str, status: int) -> int:
    print(f"sangam generate: {' '.join(reason.split())}", file=sys.stderr)
    return status


class _Interrupt:
    """Ctrl-C and SIGTERM end the run between two steps; a second one ends it at once."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> _Interrupt:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        signal.signal(number, signal.SIG_DFL)


def _is_stream(source: str) -> bool:
    """Whether it can be read only once: stdin, a pipe, a device."""
    path = Path(source)
    return source == STREAM or path.is_fifo() or path.is_char_device()


@contextlib.contextmanager
def _opened(source: str) -> Iterator[BinaryIO]:
    if _is_stream(source):
        if source == STREAM and sys.stdin is None:
            raise BatchError("stdin is closed; give a file or something to read from")
        # Neither sys.stdin nor ever closed: when the process ends, a thread may still be reading it.
        file = sys.stdin.fileno() if source == STREAM else os.open(source, os.O_RDONLY)
        yield open(file, "rb", closefd=False)
    else:
        with Path(source).open("rb") as stream:
            yield stream


def _answers(source: str, target: str) -> AnswersFile | AnswersStream:
    if target == STREAM:
        if sys.stdout is None:
            raise BatchError("stdout is closed; name a file for the answers")
        return AnswersStream()
    path = Path(target)
    if _is_stream(source) and path.exists() and path.stat().st_size:
        raise BatchError(f"{target} holds answers already: only a run whose input is a file can be resumed")
    if not _is_stream(source) and path.exists() and os.path.samefile(source, target):
        raise BatchError(f"{target} is the input, too; choose another output")
    return AnswersFile(path)


def _survey(source: str, answers: AnswersFile | AnswersStream) -> int | None:
    """How many requests the input holds; None if only its end will tell.

    Raises:
        BatchError: the answers that are there belong to another input.
    """
    if _is_stream(source):
        return None
    num_lines = 0
    missing = set(answers.answered)
    with Path(source).open("rb") as stream:
        for index, line in lines(stream):
            num_lines += 1
            missing.discard(index)
            if (known := answers.answered.get(index)) is None:
                continue
            found = _custom_id(line)
            if found != known:
                raise BatchError(
                    f"the output answers another input: line {index + 1} is {known!r} there, {found!r} in {source}"
                )
    if missing:
        raise BatchError(f"the output answers another input: {source} has no line {min(missing) + 1}")
    return num_lines


def _custom_id(line: bytes) -> str | None:
    try:
        return custom_id(read_fields(line))
    except InvalidRequestError:
        return None


def _load(config: ColocatedWorkerConfig) -> tuple[Engine, TextProcessor, ModelCard]:
    try:
        text = TextProcessor(config.model)
    except Exception as error:  # tokenizers raises plain Exception
        raise BatchError(f"cannot read the tokenizer of {config.model}: {error}") from None
    on_this_machine = engine_config(config, SchedulerConfig(config.token_budget, config.max_num_seqs))
    try:
        engine = Engine.from_config(on_this_machine)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise BatchError(f"cannot run {config.model} on {on_this_machine.device}: {error}") from None
    return engine, text, model_card(config.model, engine.runner.model.config, on_this_machine.dtype)


def _jobs(
    stream: BinaryIO,
    source: str,
    answered: Mapping[int, str | None],
    text: TextProcessor,
    card: ModelCard,
    limits: Limits,
    defaults: Mapping[str, Any],
) -> Iterator[Job | Answer | None]:
    for at in arriving(stream) if _is_stream(source) else lines(stream):
        if at is None:
            yield None
            continue
        index, line = at
        if index in answered:
            continue
        name = None
        try:
            fields = plain_fields(line, text.has_chat_template) if source.endswith(".txt") else read_fields(line)
            name = custom_id(fields)
            asked = parse_line(fields, text, defaults)
            request = build_request(str(index), asked.prompt, asked.options, card, limits, float(index), revises=True)
            yield Job(index, request, asked.stop, name)
        except InvalidRequestError as error:
            yield Answer(index, name, error=str(error))


def _answer(
    batch: OfflineBatch, answers: AnswersFile | AnswersStream, progress: GenerateProgress, interrupt: _Interrupt
) -> Totals:
    totals = Totals()
    started = time.monotonic()
    while not interrupt.number and (ended := batch.step()) is not None:
        for answer in ended:
            answers.write(answer)
            totals.num_tokens += len(answer.tokens)
            if answer.error:
                totals.num_failures += 1
            else:
                totals.num_answers += 1
        totals.num_steps, totals.num_forwards = batch.num_steps, batch.num_forwards
        totals.seconds = time.monotonic() - started
        progress.update(totals)
    return totals
