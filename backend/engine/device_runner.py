"""Runs steps without waiting for what they commit: that stays on the device, where the next step finds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from backend.attention.base import AttentionBackend
from backend.attention.kv_cache import KVCache
from backend.core.block import Block
from backend.core.queries import is_steady
from backend.core.request import Request
from backend.core.step import StepPlan, StepResult
from backend.engine.decode_graphs import DecodeGraphs
from backend.engine.device_batch import DeviceBatch, Row, logit_rows, num_candidates
from backend.engine.staging import Download
from backend.models.layers import Transformer
from backend.sampling.dense_unmask import FAILED
from backend.sampling.fused import FusedUnmasker
from backend.sampling.seats import Seats

LONGEST_BLOCK = 64


class DeviceRunner:
    """Owns what is committed of blocks that are being denoised, on the model's device.

    Takes plans of plain requests alone: those whose steps need nothing of the results before.

    Args:
        max_num_seqs: requests of a step, at most.
        min_rows: see `PackedBatch`.
        records: whether steps of denoising alone run as `DecodeGraphs`, and of which sizes.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        attention: AttentionBackend,
        max_num_seqs: int,
        min_rows: int,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.cache = cache
        self.attention = attention
        self.max_num_seqs = max_num_seqs
        self._min_rows = min_rows
        config, device = model.config, cache.data.device
        # Those of the step that runs and those of the next, and one where nothing is ever masked.
        self.seats = Seats(2 * max_num_seqs + 1, LONGEST_BLOCK, device, config.mask_token_id, config.logits_shift)
        self._free_seats = list(range(2 * max_num_seqs))
        self._rows: dict[Block, Row] = {}
        """The blocks that have a seat, those of the last step last."""
        self.unmasker = FusedUnmasker(
            max(max_num_seqs * LONGEST_BLOCK, min_rows),
            max_num_seqs,
            LONGEST_BLOCK,
            device,
            vocab_size=config.vocab_size,
            mask_token_id=config.mask_token_id,
        )
        self._graphs = None
        self._batch: DeviceBatch | None = None
        self._batch_rows: list[Row] = []

    def is_plain(self, request: Request) -> bool:
        """Whether this can run the steps of a request, from its block's first or from any later one on."""
        return is_steady(request) and self.seats.fits(request)

    def takes(self, plan: StepPlan) -> bool:
        requests = (*plan.prefills, *plan.decodes)
        return len(requests) <= self.max_num_seqs and all(map(self.is_plain, requests))

    def forget(self, requests: Sequence[Request]) -> None:
        """Somebody else runs a step of these."""
        for request in requests:
            row = self._rows.pop(request.block, None)
            if row is not None:
                self._free_seats.append(row.seat)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> RunningStep:
        """Begins a step; its commits are those of the requests' blocks as they are when it gets its turn."""
        requests = (*plan.prefills, *plan.decodes)
        rows = self._seated(requests)
        shift = self.model.config.logits_shift
        num_rows = max(num_candidates(plan, shift), self._min_rows)
        if self._graphs is not None and not plan.prefills and self._graphs.fit(rows):
            return RunningStep(requests, self._graphs.run(rows, num_rows))
        batch = self._packed(plan, requests, rows)
        batch.fill_in(self.seats.tokens)
        attention = self.attention.begin(batch.slots, batch.spans, on_layer)
        hidden = self.model(batch.token_ids, batch.positions, attention)
        place = self.unmasker.compact(batch.seat_of, self.seats, num_rows)
        index = logit_rows(place, batch.first_row, batch.least_row, LONGEST_BLOCK, shift)
        logits = self.model.logits(hidden.index_select(0, index))
        return RunningStep(requests, self.unmasker.run(logits, place, batch.seat_of, self.seats))

    def _seated(self, requests: Sequence[Request]) -> list[Row]:
        """The row of each request; blocks that have none yet get a seat, with what is known of them."""
        rows: list[Row] = []
        new: list[Request] = []
        for request in requests:
            row = self._rows.pop(request.block, None)
            if row is None:
                new.append(request)
                row = Row(request, self._seat(), self.cache)
            self._rows[request.block] = row
            rows.append(row)
        if new:
            self.seats.take([self._rows[request.block].seat for request in new], new)
        return rows

    def _seat(self) -> int:
        if not self._free_seats:
            oldest = next(iter(self._rows))
            self._free_seats.append(self._rows.pop(oldest).seat)
        return self._free_seats.pop()

    def _packed(self, plan: StepPlan, requests: Sequence[Request], rows: list[Row]) -> DeviceBatch:
        if self._batch is not None and not plan.prefills and rows == self._batch_rows:
            return self._batch
        batch = DeviceBatch(
            requests,
            rows,
            len(plan.prefills),
            self.cache,
            self.model.config.mask_token_id,
            self._min_rows,
        )
        # One that never runs again would hold its tensors for nothing.
        self._batch, self._batch_rows = (None, []) if plan.prefills else (batch, rows)
        return batch


class RunningStep:
    """A step on its way.

    Args:
        commits: int32 [B, L], the token committed at each offset, -1 for none.
    """

    def __init__(self, requests: Sequence[Request], commits: Tensor) -> None:
        self._requests = requests
        self._starts = [request.block_start for request in requests]
        self._commits = Download(commits)

    def result(self) -> StepResult:
        """Waits for the step's end."""
        commits = self._commits.array()
        rows, offsets = np.nonzero(commits[: len(self._requests)] != -1)
        per_request: list[list[tuple[int, int]]] = [[] for _ in self._requests]
        errors: dict[str, str] = {}
        for row, offset, token in zip(rows.tolist(), offsets.tolist(), commits[rows, offsets].tolist(), strict=True):
            if token == FAILED:
                position = self._starts[row] + offset
                errors[self._requests[row].request_id] = f"the model's logits at position {position} are not finite"
            per_request[row].append((offset, token))
        return StepResult(per_request, errors)
