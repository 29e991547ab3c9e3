"""Runs steps without waiting for what they commit: that stays on the device, where the next step finds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from backend.attention.base import AttentionBackend
from backend.attention.kv_cache import KVCache
from backend.core.block import Block
from backend.core.queries import is_steady
from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.core.step import StepPlan, StepResult
from backend.engine.batch import min_rows
from backend.engine.decode_graphs import DecodeGraphs
from backend.engine.device_batch import DeviceBatch, Row, logit_rows, num_candidates
from backend.engine.host_choice import HostChoice
from backend.engine.staging import Download
from backend.models.layers import Transformer
from backend.sampling.fused import FusedUnmasker
from backend.sampling.sampler import FAILED as HOST_FAILED
from backend.sampling.seats import FAILED, NOTHING, Seats

LONGEST_BLOCK = 64
_ROWS = 16
MAX_SEATED = 512
"""Requests of a step, at most: the memory for what is committed of them is allocated at the start."""


class DeviceRunner:
    """Owns what is committed of blocks that are being denoised, on the model's device.

    Takes plans of plain requests alone: those whose steps need nothing of the results before.

    Args:
        max_num_seqs: requests of a step, at most.
        graph_sizes: steps of denoising alone run as `DecodeGraphs` of these sizes, if any.
        max_length: of the sequences, prompt + canvas, in such steps.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        attention: AttentionBackend,
        max_num_seqs: int,
        graph_sizes: Sequence[int] = (),
        max_length: int = 0,
    ) -> None:
        self.model = model
        self.cache = cache
        self.attention = attention
        self.max_num_seqs = max_num_seqs
        config, device = model.config, cache.data.device
        self._min_rows = min_rows(device)
        # Those of the step that runs and those of the next, and one where nothing is ever masked.
        self.seats = Seats(
            2 * max_num_seqs + 1,
            LONGEST_BLOCK,
            device,
            mask_token_id=config.mask_token_id,
            logits_shift=config.logits_shift,
        )
        self._free_seats = list(range(2 * max_num_seqs))
        self._rows: dict[Block, Row] = {}
        """The blocks that have a seat, those of the last step last."""
        self.unmasker = FusedUnmasker(
            max(max_num_seqs * LONGEST_BLOCK, self._min_rows),
            max_num_seqs,
            LONGEST_BLOCK,
            device,
            vocab_size=config.vocab_size,
            mask_token_id=config.mask_token_id,
        )
        self.graphs: DecodeGraphs | None = None
        block_length = config.defaults.get("block_length", SamplingParams.block_length)
        if graph_sizes and block_length <= LONGEST_BLOCK:
            self.graphs = DecodeGraphs(
                model,
                cache,
                attention,
                self.seats,
                self.unmasker,
                sizes=graph_sizes,
                scratch_seat=2 * max_num_seqs,
                block_length=block_length,
                max_length=max_length,
            )
        self._batch: DeviceBatch | None = None
        self._batch_rows: list[Row] = []

    def is_plain(self, request: Request) -> bool:
        """Whether a step of this request can be launched before the result of the one before is known."""
        return is_steady(request) and self.seats.fits(request)

    def takes(self, plan: StepPlan) -> bool:
        """Whether this can run `plan`. The tokens of requests that do not fit a seat are chosen on the host."""
        requests = (*plan.prefills, *plan.decodes)
        return len(requests) <= self.max_num_seqs and all(
            request.block in self._rows or (is_steady(request) and request.block.length <= LONGEST_BLOCK)
            for request in requests
        )

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
        # Rounded up: Triton compiles for a size of 1, and for multiples of 16, apart from all others.
        num_rows = -(-max(num_candidates(plan, shift), self._min_rows) // _ROWS) * _ROWS
        begins: Sequence[int]
        first_rows: Sequence[int]
        if self.graphs is not None and not plan.prefills and self.graphs.fit(rows):
            hidden, commits = self.graphs.run(rows, num_rows)
            begins = first_rows = range(0, len(hidden), self.graphs.block_length)
        else:
            batch = self._packed(plan, requests, rows)
            batch.fill_in(self.seats.tokens)
            attention = self.attention.begin(batch.slots, batch.spans, on_layer)
            hidden = self.model(batch.token_ids, batch.positions, attention)
            place = self.unmasker.compact(batch.seat_of, self.seats, num_rows)
            index = logit_rows(place, batch.first_row, batch.least_row, LONGEST_BLOCK, shift)
            logits = self.model.logits(hidden.index_select(0, index))
            commits = self.unmasker.run(logits, place, batch.seat_of, self.seats)
            first_rows, begins = batch.first_rows, batch.begins
        download = Download(commits)
        others = {i: request for i, (request, row) in enumerate(zip(requests, rows, strict=True)) if not row.fits}
        chosen = None
        if others:
            config = self.model.config
            chosen = HostChoice(
                others,
                hidden,
                self.model.logits,
                first_rows,
                begins,
                vocab_size=config.vocab_size,
                mask_token_id=config.mask_token_id,
                logits_shift=shift,
                min_rows=self._min_rows,
            )
        return RunningStep(requests, download, chosen)

    def _seated(self, requests: Sequence[Request]) -> list[Row]:
        """The row of each request; blocks that have none yet get a seat, with what is known of them."""
        known = {request.block: row for request in requests if (row := self._rows.pop(request.block, None))}
        self._rows.update(known)
        rows: list[Row] = []
        taken: list[tuple[int, Request]] = []
        for request in requests:
            row = known.get(request.block)
            if row is None:
                row = Row(request, self._seat(), self.cache, self.seats.fits(request))
                self._rows[request.block] = row
                taken.append((row.seat, request))
            elif not row.fits:
                taken.append((row.seat, request))  # its tokens come from the host, every time
            rows.append(row)
        if taken:
            self.seats.take([seat for seat, _ in taken], [request for _, request in taken])
        if others := [row.seat for row in rows if not row.fits]:
            self.seats.leave(others)
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
        chosen: what was chosen on the host.
    """

    def __init__(self, requests: Sequence[Request], commits: Download, chosen: HostChoice | None) -> None:
        self._requests = requests
        self._starts = [request.block_start for request in requests]
        self._commits = commits
        self._chosen = chosen

    def result(self) -> StepResult:
        """Waits for the step's end."""
        commits = self._commits.array()[: len(self._requests)]
        per_request: list[list[tuple[int, int]]] = [[] for _ in self._requests]
        rows, offsets = np.nonzero(commits != NOTHING)
        for row, offset, token in zip(rows.tolist(), offsets.tolist(), commits[rows, offsets].tolist(), strict=True):
            per_request[row].append((offset, token))
        failures = [(row, offset) for row, offset in np.argwhere(commits == FAILED).tolist()]
        logprobs = {}
        if self._chosen is not None:
            logprobs = self._chosen.logprobs
            for row, pairs in self._chosen.commits.items():
                per_request[row] = pairs
                failures += [(row, offset) for offset, token in pairs if token == HOST_FAILED]
        errors = {
            self._requests[
                row
            ].request_id: f"the model's logits at position {self._starts[row] + offset} are not finite"
            for row, offset in failures
        }
        return StepResult(per_request, errors, logprobs)
