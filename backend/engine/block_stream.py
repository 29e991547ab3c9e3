"""What the engine says of one block, in updates that one task of the event loop reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from backend.core.logprobs import TokenLogprobs
from backend.core.request import Request, RequestStatus
from backend.core.step import NO_TIME, PhaseSeconds
from backend.transfer.base import TransferStats

Pull = Callable[[Sequence[int]], "Future[TransferStats]"]
"""Starts reading a block's KV into these pages of ours."""


@dataclass(frozen=True)
class HeldBlock:
    """A block that a prefill worker has prefilled and whose KV it keeps until somebody has read it.

    With `is_running` the prefill has only begun: its KV can be read layer by layer, and what it commits
    is told with a second `held`.

    Attributes:
        pages: of this worker, in the sequence's order.
        stamp: what the pages' stamp is for as long as they hold this KV (see `KVTransfer.stamp`).
        commits: (offset in block, token) of everything that is committed.
        logprobs: of each of these, if the request asks for them.
    """

    pages: tuple[int, ...]
    stamp: int
    commits: tuple[tuple[int, int], ...]
    is_running: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class BlockUpdate:
    """News of one block.

    Attributes:
        tokens: what the frontier moved over since the last update.
        is_done: the engine is done with this block; no update follows.
        held: its KV is ready to be read; the last update then says that it is gone.
        error: why the block failed, if it did.
        is_retryable: another attempt may succeed: nothing is wrong with the request.
        seconds: time spent per phase (`PHASES`), told with `held` and at the end.
        num_steps: forwards this block took part in so far.
        logprobs: of each of the tokens, if the request asks for them.
    """

    tokens: tuple[int, ...]
    is_done: bool
    held: HeldBlock | None = None
    error: str | None = None
    is_retryable: bool = False
    seconds: PhaseSeconds = NO_TIME
    num_steps: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


class EngineDeadError(RuntimeError):
    """The step loop has stopped; the process should end and be started again."""


class BlockStream:
    """One block's updates, to be read by one task of the event loop; see `AsyncEngine.submit`."""

    def __init__(self, request: Request, pull: Pull | None, abort: Callable[[BlockStream, str], None]) -> None:
        self.request = request
        self.pull = pull
        self._abort = abort
        self._updates: asyncio.Queue[BlockUpdate | Exception] = asyncio.Queue()
        self.sent = request.block.frontier
        self.added_at = time.monotonic()
        self.started_at = 0.0
        """When its prefill or its transfer began."""
        self.ready_at = 0.0
        """When its KV was there."""
        self.is_prefilled = request.status is not RequestStatus.WAITING_FOR_KV or request.block.step > 0
        """Whether it is known what its prefill committed, if that ran elsewhere."""
        self.has_arrived = False

    def abort(self, reason: str = "aborted") -> None:
        """Frees what the block holds within a step; the stream then ends with an error. Idempotent."""
        self._abort(self, reason)

    def seconds(self, now: float) -> PhaseSeconds:
        """What the block's time was spent on here, up to `now`."""
        waited, ready, denoised = (
            self.started_at - self.added_at,
            self.ready_at - self.started_at,
            now - self.ready_at,
        )
        if self.pull is not None:
            return 0.0, 0.0, waited, ready, denoised
        return waited, ready, 0.0, 0.0, denoised

    def put(self, item: BlockUpdate | Exception) -> None:
        self._updates.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[BlockUpdate]:
        """Updates that came while the reader was busy come as one, but for those with `held`.

        Raises:
            InvalidRequestError: the request can never fit this worker.
            EngineDeadError: the step loop has failed.
        """
        done = False
        try:
            while not done:
                update = _update(await self._updates.get())
                while not self._updates.empty() and update.held is None:
                    update = _merged(update, _update(self._updates.get_nowait()))
                done = update.is_done
                yield update
        finally:
            if not done:
                self.abort()


def _update(item: BlockUpdate | Exception) -> BlockUpdate:
    if isinstance(item, Exception):
        raise item
    return item


def _merged(first: BlockUpdate, then: BlockUpdate) -> BlockUpdate:
    return replace(then, tokens=first.tokens + then.tokens, logprobs=first.logprobs + then.logprobs)
