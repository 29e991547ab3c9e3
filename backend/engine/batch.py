"""StepPlan -> one packed batch. T packed tokens, B requests, L the longest block among them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from backend.attention.base import SequenceSpan
from backend.attention.kv_cache import KVCache, PagedSequence
from backend.core.cache_policy import Recompute
from backend.core.queries import Range, commits_only_first, query
from backend.core.request import Request
from backend.core.step import StepPlan
from backend.sampling.sampler import SamplingBatch


def min_rows(device: torch.device) -> int:
    """How many rows the matrix products of a step have at least.

    On a CPU, those of very few rows take another path in the BLAS libraries, whose rounding would make a
    lone request's tokens differ from the same request's in a batch.
    """
    return 8 * max(torch.get_num_threads(), 2) if device.type == "cpu" else 1


class BlockState:
    """A request's part of a batch for as long as it denoises one block.

    Attributes:
        ids: int64 [L], the block's tokens, the mask token where it is masked.
        is_masked: bool [L].
        kv: where the sequence's KV lies; the same object for as long as the block lasts.
    """

    def __init__(self, request: Request, cache: KVCache, mask_token_id: int) -> None:
        self.request = request
        self.block = request.block
        self._mask_token_id = mask_token_id
        tokens = request.block.tokens
        self.is_masked = np.array([token is None for token in tokens])
        self.ids = np.array([mask_token_id if token is None else token for token in tokens])
        start, end = request.block_start, request.block_start + request.block.length
        self.kv = PagedSequence(cache, request.pages, request.sequence_length)
        self.block_slots = self.kv.slots[start:end]
        self.block_positions = np.arange(start, end)

    def commit(self, offset: int, token: int) -> None:
        self.ids[offset] = token
        self.is_masked[offset] = False

    @cached_property
    def sequence(self) -> NDArray[np.int64]:
        """Prompt, finished blocks, the current block, masks to the end of the canvas: int64 [S]."""
        request = self.request
        before = np.array((*request.prompt, *request.response), dtype=np.int64)
        after = np.full(request.sequence_length - len(before) - len(self.ids), self._mask_token_id)
        whole = np.concatenate((before, self.ids, after))
        self.ids = whole[len(before) : len(before) + len(self.ids)]  # one memory: a commit is seen in both
        return whole

    def query(self, ranges: Sequence[Range]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Token ids, slots and positions of some ranges of the sequence."""
        start = self.request.block_start
        if len(ranges) == 1 and ranges[0] == (start, start + len(self.ids)):
            return self.ids, self.block_slots, self.block_positions
        positions = np.concatenate([np.arange(*positions) for positions in ranges])
        return self.sequence[positions], self.kv.slots[positions], positions


class PackedBatch:
    """Whole sequences of the prefills, then what the decodes recompute, then padding.

    Args:
        min_rows: it is padded to so many tokens.
        logits_shift: see `ModelConfig`.

    Attributes:
        token_ids: int64 [T], with the mask token where a position is masked.
        positions, slots: int64 [T].
        longest_block: L.
    """

    def __init__(
        self,
        plan: StepPlan,
        states: Sequence[BlockState],
        cache: KVCache,
        mask_token_id: int,
        logits_shift: int,
        min_rows: int,
    ) -> None:
        requests = (*plan.prefills, *plan.decodes)
        num_prefills = len(plan.prefills)
        longest = max(request.block.length for request in requests)
        ids: list[NDArray[np.int64]] = []
        slots: list[NDArray[np.int64]] = []
        positions: list[NDArray[np.int64]] = []
        self.spans: list[SequenceSpan] = []
        begins: list[int] = []
        first_rows: list[int] = []
        scattered: dict[int, NDArray[np.int64]] = {}
        only_first = np.array([commits_only_first(request, logits_shift) for request in requests])
        is_masked = np.zeros((len(requests), longest), dtype=bool)
        rows = 0
        for i, (request, state) in enumerate(zip(requests, states, strict=True)):
            begin = rows
            begins.append(begin)
            is_masked[i, : request.block.length] = state.is_masked
            if i < num_prefills:
                if only_first[i]:
                    is_masked[i, 1:] = False
                rows += request.sequence_length
                first_rows.append(begin + request.block_start)
                ids.append(state.sequence)
                slots.append(state.kv.slots)
                positions.append(np.arange(request.sequence_length))
                self.spans.append(SequenceSpan(begin, rows, state.kv))
            else:
                ranges = query(request, logits_shift)
                query_ids, query_slots, query_positions = state.query(ranges)
                rows += len(query_ids)
                first_rows.append(begin + request.block_start - ranges[0][0])
                if len(ranges) > 1 or request.params.policy.recompute is Recompute.NEARBY:
                    scattered[i] = query_positions
                ids.append(query_ids)
                slots.append(query_slots)
                positions.append(query_positions)
                self.spans.append(SequenceSpan(begin, rows, state.kv))
        if padding := max(min_rows - rows, 0):
            ids.append(np.zeros(padding, dtype=np.int64))
            slots.append(np.full(padding, cache.scratch_slot))
            positions.append(np.zeros(padding, dtype=np.int64))
        device = cache.data.device
        self.longest_block = longest
        offsets = np.arange(longest)
        block_rows = np.array(first_rows)[:, None] + offsets
        # Before position 0 there is no row: it is predicted by its own, as in Dream's own code.
        logit_rows = np.maximum(block_rows - logits_shift, np.array(begins)[:, None])
        for i, query_positions in scattered.items():
            predictors = np.maximum(requests[i].block_start + offsets - logits_shift, 0)
            _locate(logit_rows[i], is_masked[i], begins[i], query_positions, predictors)
        self._block_rows = block_rows.ravel()
        self._logit_rows = logit_rows.ravel()
        self._is_masked = is_masked.ravel()
        self._ids = np.concatenate(ids)
        # On the CPU these share memory with the arrays: `write` reaches the model without a copy.
        self.token_ids = torch.from_numpy(self._ids).to(device)
        self.slots = torch.from_numpy(np.concatenate(slots)).to(device)
        self.positions = torch.from_numpy(np.concatenate(positions)).to(device)
        self.sampling = SamplingBatch(requests, longest, device, only_first)

    def masked_places(self) -> NDArray[np.int64]:
        """Where a token may still be unmasked: `request row * L + offset`, ascending."""
        return self._is_masked.nonzero()[0]

    def logit_rows(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The packed row whose logits predict each place."""
        return self._logit_rows.take(places)

    def write(self, places: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Puts committed tokens [M] in place for the next step of the same requests, all of them steady."""
        self._ids[self._block_rows.take(places)] = tokens
        self._is_masked[places] = False
        if self.token_ids.device.type != "cpu":
            self.token_ids.copy_(torch.from_numpy(self._ids), non_blocking=True)


def _locate(
    logit_rows: NDArray[np.int64],
    is_masked: NDArray[np.bool_],
    begin: int,
    positions: NDArray[np.int64],
    predictors: NDArray[np.int64],
) -> None:
    """Finds in a query of scattered `positions` the rows that predict a block; what has none waits."""
    at = np.minimum(positions.searchsorted(predictors), len(positions) - 1)
    logit_rows[:] = begin + at
    is_masked &= positions[at] == predictors
