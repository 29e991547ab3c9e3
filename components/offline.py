"""Requests through an engine of this process, no server between: as many in flight as its pages allow."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from backend.core.request import Request, RequestStatus
from backend.core.sampling_params import InvalidRequestError
from backend.engine.engine import Engine
from components.chunks import FINISH_REASONS
from components.text import TextStream

LOOK_AHEAD = 64
_IDLE_S = 0.001


@dataclass(frozen=True)
class Job:
    """A request of a batch.

    Attributes:
        index: its place in the batch; also its arrival time, so that what comes first goes ahead.
        custom_id: what whoever asks calls it.
        stop: strings that end the answer and are not part of it.
    """

    index: int
    request: Request
    stop: Sequence[str] = ()
    custom_id: str | None = None


@dataclass(frozen=True)
class Answer:
    """Attributes:
    finish_reason: "stop" or "length"; empty if there is no answer.
    num_forwards: forwards that this request was part of.
    error: why there is no answer.
    """

    index: int
    custom_id: str | None = None
    text: str = ""
    tokens: Sequence[int] = ()
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    num_forwards: int = 0
    error: str = ""


class _Trip:
    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self.job = job
        self.text = TextStream(tokenizer, job.stop, job.request.params.min_tokens)
        self.pieces: list[str] = []
        self.tokens: list[int] = []
        self.num_read = 0
        self.num_forwards = 0

    def read(self) -> str:
        """Takes in what the answer has grown by; the finish reason once it has ended."""
        tokens, status = self.job.request.answer(self.num_read)
        self.num_read += len(tokens)
        kept, piece = self.text.push(tokens)
        self.tokens += kept
        self.pieces.append(piece)
        if self.text.is_stopped:
            return "stop"
        if status is None:
            return ""
        self.pieces.append(self.text.finish())
        return FINISH_REASONS[status]

    def answer(self, finish_reason: str = "", error: str = "") -> Answer:
        job = self.job
        return Answer(
            job.index,
            job.custom_id,
            "".join(self.pieces),
            self.tokens,
            finish_reason,
            len(job.request.prompt),
            self.num_forwards + job.request.block.step,
            error,
        )


class OfflineBatch:
    """`step()` until it returns None.

    Args:
        jobs: drawn from as the engine takes them in; an Answer among them has failed before, None says
            that there is none yet.
        look_ahead: how many blocks wait in the engine at most before more is drawn.

    Attributes:
        num_steps: forwards of the engine.
        num_forwards: the same, counted for each request in it.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, jobs: Iterable[Job | Answer | None], look_ahead: int = LOOK_AHEAD
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._jobs = iter(jobs)
        self._is_drained = False
        self._look_ahead = look_ahead
        self._trips: dict[str, _Trip] = {}
        self.num_steps = 0
        self.num_forwards = 0

    def step(self) -> list[Answer] | None:
        """One forward; what ended with it, or None when all is answered."""
        answers = self._draw()
        has_work = self._engine.scheduler.has_work
        if not has_work and self._is_drained:
            return answers or None
        output = self._engine.step(now=time.monotonic()) if has_work else None
        if output is None:  # the scheduler waits for more requests, or for the time to go on without
            time.sleep(_IDLE_S)
            return answers
        ran = (*output.plan.prefills, *output.plan.decodes)
        self.num_steps += 1
        self.num_forwards += len(ran)
        left = set(output.left)
        for request in ran:
            trip = self._trips[request.request_id]
            if request not in left:
                # A stop string ends an answer in the middle of its block.
                if trip.job.stop and (reason := trip.read()):
                    answers.append(self._end(trip, reason))
            elif request.status is RequestStatus.FINISHED_ERROR:
                answers.append(self._end(trip, error=output.errors[request.request_id]))
            elif reason := trip.read():
                answers.append(self._end(trip, reason))
            else:
                trip.num_forwards += request.block.step
                request.next_block()
                self._engine.scheduler.add(request)
        return answers

    def _draw(self) -> list[Answer]:
        """Draws some jobs; those that have failed."""
        failed: list[Answer] = []
        for _ in range(self._look_ahead - self._engine.scheduler.num_waiting):
            try:
                job = next(self._jobs)
            except StopIteration:
                self._is_drained = True
                break
            if job is None:
                break
            if isinstance(job, Answer):
                failed.append(job)
                continue
            try:
                self._engine.scheduler.add(job.request)
            except InvalidRequestError as error:
                failed.append(Answer(job.index, job.custom_id, error=str(error)))
            else:
                self._trips[job.request.request_id] = _Trip(job, self._tokenizer)
        return failed

    def _end(self, trip: _Trip, reason: str = "", error: str = "") -> Answer:
        del self._trips[trip.job.request.request_id]
        self._engine.scheduler.abort(trip.job.request.request_id)
        return trip.answer(reason, error)
