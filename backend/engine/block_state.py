"""What the host knows of a block that is being denoised, and what a step computes of it."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from backend.attention.kv_cache import KVCache, PagedSequence
from backend.core.cache_policy import Recompute
from backend.core.queries import commits_only_first, query
from backend.core.request import Request
from backend.engine.packing import Bools, Ints
from backend.models.config import ModelConfig


class Part(NamedTuple):
    """What one step computes of a request: Q queries, L positions in its block.

    Attributes:
        ids, slots, positions: int64 [Q], with the mask token where a position is masked.
        kv: where the sequence's KV lies; the same object for as long as the block lasts.
        logit_rows: int64 [L], the query whose row of logits predicts each position.
        is_masked: bool [L], whether a token may be unmasked there.
        only_first: see `commits_only_first`.
    """

    ids: Ints
    slots: Ints
    positions: Ints
    kv: PagedSequence
    logit_rows: Ints
    is_masked: Bools
    only_first: bool


class BlockState:
    """A request's part of its steps for as long as it denoises one block."""

    def __init__(self, request: Request, cache: KVCache, config: ModelConfig) -> None:
        self.request = request
        self._mask_token_id, self._logits_shift = config.mask_token_id, config.logits_shift
        tokens = request.block.tokens
        self._is_masked = np.array([token is None for token in tokens])
        self._ids = np.array([self._mask_token_id if token is None else token for token in tokens])
        start, end = request.block_start, request.block_start + request.block.length
        self._kv = PagedSequence(cache, request.pages, request.sequence_length)
        self._block_slots = self._kv.slots[start:end]
        self._block_positions = np.arange(start, end)
        # Before position 0 there is no row: it is predicted by its own, as in Dream's own code.
        self._predictors = np.maximum(self._block_positions - self._logits_shift, 0)
        self._rows_of_block = np.maximum(self._predictors - start, 0)

    def commit(self, offset: int, token: int) -> None:
        self._ids[offset] = token
        self._is_masked[offset] = False

    def part(self, is_whole: bool) -> Part:
        """Of the next step, which computes the whole sequence or what the request's cache policy recomputes."""
        if is_whole:
            only_first = commits_only_first(self.request, self._logits_shift)
            is_masked = self._is_masked
            if only_first:
                is_masked = is_masked.copy()
                is_masked[1:] = False
            positions = np.arange(self.request.sequence_length)
            return Part(self._sequence, self._kv.slots, positions, self._kv, self._predictors, is_masked, only_first)
        ranges = query(self.request, self._logits_shift)
        start = self.request.block_start
        is_scattered = len(ranges) > 1 or self.request.params.policy.recompute is Recompute.NEARBY
        kv, is_masked = self._kv, self._is_masked
        if not is_scattered and ranges[0] == (start, start + len(self._ids)):
            ids, slots, positions = self._ids, self._block_slots, self._block_positions
            return Part(ids, slots, positions, kv, self._rows_of_block, is_masked, False)
        positions = np.concatenate([np.arange(*positions) for positions in ranges])
        if is_scattered:
            rows = np.minimum(positions.searchsorted(self._predictors), len(positions) - 1)
            is_masked = is_masked & (positions[rows] == self._predictors)  # what no query predicts waits
        else:
            rows = np.maximum(self._predictors - ranges[0][0], 0)
        return Part(self._sequence[positions], kv.slots[positions], positions, kv, rows, is_masked, False)

    @cached_property
    def _sequence(self) -> Ints:
        """Prompt, finished blocks, the current block, masks to the end of the canvas: int64 [S]."""
        request = self.request
        before = np.array((*request.prompt, *request.response), dtype=np.int64)
        after = np.full(request.sequence_length - len(before) - len(self._ids), self._mask_token_id)
        whole = np.concatenate((before, self._ids, after))
        self._ids = whole[len(before) : len(before) + len(self._ids)]  # one memory: a commit is seen in both
        return whole
