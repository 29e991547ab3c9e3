"""A request on its way through the system: its tokens, its current block, its status."""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Sequence

from backend.core.block import Block, IllegalTransitionError
from backend.core.logprobs import TokenLogprobs
from backend.core.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """See design: WAITING -> PREFILLING -> (WAITING_FOR_KV -> TRANSFERRING) -> DENOISING -> WAITING ... FINISHED."""

    WAITING = enum.auto()
    PREFILLING = enum.auto()
    WAITING_FOR_KV = enum.auto()
    TRANSFERRING = enum.auto()
    DENOISING = enum.auto()
    FINISHED_STOP = enum.auto()
    FINISHED_LENGTH = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    __hash__ = object.__hash__  # Enum's own is Python code, and every transition looks up two

    @property
    def is_finished(self) -> bool:
        return self in _TERMINAL


_S = RequestStatus
_TERMINAL = frozenset({_S.FINISHED_STOP, _S.FINISHED_LENGTH, _S.FINISHED_ABORTED, _S.FINISHED_ERROR})
_ANY_TIME = frozenset({_S.FINISHED_ABORTED, _S.FINISHED_ERROR})
_ENDED = frozenset({_S.WAITING, _S.FINISHED_STOP, _S.FINISHED_LENGTH})
# WAITING is reachable from everywhere on the way: a lost worker sends the block back to the queue.
_LEGAL: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING: frozenset({_S.PREFILLING}) | _ANY_TIME,
    _S.PREFILLING: frozenset({_S.WAITING_FOR_KV, _S.DENOISING}) | _ENDED | _ANY_TIME,
    _S.WAITING_FOR_KV: frozenset({_S.TRANSFERRING, _S.WAITING}) | _ANY_TIME,
    # Where KV is read while its prefill runs, what that commits may complete the answer on the way.
    _S.TRANSFERRING: frozenset({_S.DENOISING}) | _ENDED | _ANY_TIME,
    _S.DENOISING: _ENDED | _ANY_TIME,
} | {status: frozenset() for status in _TERMINAL}


class Request:
    """One request; lives in the router, and for the time of a block in a worker.

    Args:
        prompt: token ids, any ids of the vocabulary.
        finished_blocks: response tokens of the blocks already done, a multiple of `block_length`.
        known: tokens of the current block that an earlier attempt already streamed.
        attempt: number of this dispatch of the block; what is said about older ones is dropped.
        prefilled: what this attempt's prefill committed on another worker, as (offset, token) pairs;
            the block then waits for its KV instead of its prefill.
        prefilled_logprobs: of each of these, if the request asks for them or revises by them.
        revises: whether this is where the blocks are denoised and, by `remask_below`, revised; a router
            only hears of final tokens.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        arrival_time: float,
        *,
        finished_blocks: Sequence[int] = (),
        known: Sequence[int] = (),
        attempt: int = 1,
        prefilled: Sequence[tuple[int, int]] | None = None,
        prefilled_logprobs: Sequence[TokenLogprobs] = (),
        revises: bool = True,
    ) -> None:
        if len(finished_blocks) % params.block_length:
            raise ValueError(f"{len(finished_blocks)} tokens are not whole blocks of {params.block_length}")
        self.request_id = request_id
        self.prompt = tuple(prompt)
        self.params = params
        self.sequence_length = len(self.prompt) + params.canvas_length
        """Prompt + canvas in tokens: what a prefill computes and what the KV cache must hold."""
        self.arrival_time = arrival_time
        self.status = RequestStatus.WAITING
        self.response = list(finished_blocks)
        self._revises = revises and params.remask_below > 0
        self.block = self._new_block(len(finished_blocks) // params.block_length, attempt, known)
        self.pages: list[int] = []
        self.owner: Hashable = None
        """Whom the pool knows as the owner of `pages`."""
        self.error: str | None = None
        """Why it failed, with FINISHED_ERROR."""
        if prefilled is not None:
            self.commit(prefilled, prefilled_logprobs)
            self.status = RequestStatus.WAITING_FOR_KV

    def _new_block(self, index: int, attempt: int = 1, known: Sequence[int] = ()) -> Block:
        return Block(index, self.params.block_length, attempt, known, is_provisional=self._revises)

    @property
    def block_start(self) -> int:
        """Absolute position of the current block's first token."""
        return len(self.prompt) + len(self.response)

    def transition(self, status: RequestStatus) -> None:
        if status not in _LEGAL[self.status]:
            raise IllegalTransitionError(f"request {self.request_id}: {self.status.name} -> {status.name}")
        self.status = status

    def commit(self, commits: Sequence[tuple[int, int]], logprobs: Sequence[TokenLogprobs] = ()) -> bool:
        """Commits (offset in block, token) pairs of one step; True if the frontier moved.

        `logprobs`: of each pair, or nothing.
        """
        block = self.block
        before = block.frontier
        for offset, token in commits:
            block.commit(offset, token)
        if logprobs:
            block.logprobs.update((offset, of) for (offset, _), of in zip(commits, logprobs, strict=True))
        block.step += 1
        return block.frontier > before

    def apply(
        self, commits: Sequence[tuple[int, int]], error: str | None = None, logprobs: Sequence[TokenLogprobs] = ()
    ) -> bool:
        """Takes in one step on a worker; True if the request leaves it: failed, ended, or block done.

        A block that is not done after all steps that it can need (`max_steps_per_block`) fails: it would
        never be.
        """
        if error is not None:
            return self._fail(error)
        has_moved = self.commit(commits, logprobs)
        if self._revises and not self.block.num_masked:
            if self._doubtful():
                return False
            self.block.settle()
            has_moved = True
        block, params = self.block, self.params
        if has_moved and (params.stop_token_ids or len(self.response) + block.frontier >= params.max_tokens):
            end = self.answer(len(self.response))[1]
            if end is not None:
                self.transition(end)
                return True
        if block.num_masked and block.step >= params.max_steps_per_block:
            return self._fail(f"block {block.index} still has {block.num_masked} masks after {block.step} steps")
        return not block.num_masked

    def _fail(self, error: str) -> bool:
        self.error = error
        self.transition(RequestStatus.FINISHED_ERROR)
        return True

    def _doubtful(self) -> list[int]:
        """Offsets that were committed with a probability below `remask_below`, if they may still be taken back."""
        if self.block.is_revised:
            return []
        least = self.params.remask_below
        return [offset for offset, of in self.block.logprobs.items() if math.exp(of.logprob) < least]

    def revise(self) -> None:
        """Takes back the doubtful tokens of a block that is whole, to be decided anew in view of all others."""
        if not self.block.num_masked:
            self.block = self.block.revised(self._doubtful())

    def answer(self, start: int = 0) -> tuple[list[int], RequestStatus | None]:
        """What may be returned so far from response position `start` on, and how the answer ended.

        Committed tokens only, in order, without the stop token and nothing after it, at most
        `max_tokens`; the status is None while the answer is not complete. Before `min_tokens` a stop
        token is a token as others are; the sampler does not put any there.
        """
        first = min(start, len(self.response))
        tail = self.response[first:] + self.block.committed_prefix()
        tail = tail[start - first :]
        room = self.params.max_tokens - start
        stop_token_ids = self.params.stop_token_ids
        for i, token in enumerate(tail[:room] if stop_token_ids else ()):
            if token in stop_token_ids and start + i >= self.params.min_tokens:
                return tail[:i], RequestStatus.FINISHED_STOP
        if len(tail) >= room:
            return tail[:room], RequestStatus.FINISHED_LENGTH
        return tail, None

    def logprobs(self, start: int, count: int) -> tuple[TokenLogprobs, ...]:
        """Of `count` tokens of the current block from response position `start` on, if they are asked for."""
        if self.params.logprobs is None:
            return ()
        first = start - len(self.response)
        return self.block.logprobs_at(range(first, first + count))

    def next_block(self) -> None:
        """Moves on to the block after a whole one; all KV is dropped (Fast-dLLM's block boundary)."""
        if self.block.num_masked:
            raise IllegalTransitionError(f"request {self.request_id}: block {self.block.index} still has masks")
        self.transition(RequestStatus.WAITING)
        self.response += self.block.committed_prefix()
        self.block = self._new_block(self.block.index + 1)

    def retry_block(self, known: Sequence[int]) -> None:
        """Starts the current block again as a new attempt; `known` is what was already streamed of it.

        The block is denoised from its first step, so that the answer is the one that an undisturbed
        run gives.
        """
        self.transition(RequestStatus.WAITING)
        self.block = self._new_block(self.block.index, self.block.attempt + 1, known)
