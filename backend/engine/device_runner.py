"""Runs steps without waiting for what they commit: that stays on the device, where the next step finds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from backend.attention.base import AttentionBackend
from backend.attention.kv_cache import KVCache
from backend.core.block import Block
from backend.core.queries import commits_only_first, is_steady
from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.core.step import StepPlan, StepResult
from backend.engine.block_state import BlockState, Part
from backend.engine.decode_graphs import DecodeGraphs
from backend.engine.device_batch import DeviceBatch, Row, logit_rows
from backend.engine.host_choice import HostChoice
from backend.engine.packing import min_rows
from backend.engine.running_step import RunningStep, SplitStep
from backend.engine.seating import LONGEST_BLOCK, Seating
from backend.engine.staging import Download
from backend.engine.step_limits import StepLimits
from backend.models.layers import Transformer
from backend.sampling.fused import FusedUnmasker

_ROWS = 16
MAX_SEATED = 512
"""Requests of a step, at most: the memory for what is committed of them is allocated at the start."""


class DeviceRunner:
    """Runs all requests of a step in one forward, and unmasks on the model's device those that it can.

    The tokens of the others are chosen on the host, from the same hidden states.

    Args:
        max_num_seqs: requests of a step that the device unmasks, at most.
        graph_sizes: steps of denoising alone run as `DecodeGraphs` of these sizes, if any.
        max_length: of the sequences, prompt + canvas, in such steps.
        limits: of one forward, if memory has any.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        attention: AttentionBackend,
        max_num_seqs: int,
        graph_sizes: Sequence[int] = (),
        max_length: int = 0,
        limits: StepLimits | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.attention = attention
        self._limits = limits
        config, device = model.config, cache.data.device
        self._seating = Seating(max_num_seqs, cache, config)
        self.unmasker = FusedUnmasker(
            _rounded(max(max_num_seqs * LONGEST_BLOCK, min_rows(device))),
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
                self._seating.seats,
                self.unmasker,
                sizes=graph_sizes,
                scratch_seat=self._seating.scratch_seat,
                block_length=block_length,
                max_length=max_length,
            )
        self._batch: DeviceBatch | None = None
        self._batch_rows: list[Row | None] = []
        self._states: dict[Block, BlockState] = {}

    def is_plain(self, request: Request) -> bool:
        """Whether a step of this request can be launched before the result of the one before is known."""
        return is_steady(request) and self._seating.seats.fits(request)

    def launch(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> RunningStep | SplitStep:
        """Begins a step; what it commits in seats is that of the blocks as they are when it gets its turn.

        Waits for its hidden states if the tokens of some requests are chosen on the host.
        """
        parts = self._limits.parts(plan, self.model.config.logits_shift) if self._limits else [plan]
        if len(parts) == 1:
            return self._launch(plan, on_layer)
        # A layer's KV is written when that of the last sequence is.
        last = max((i for i, part in enumerate(parts) if part.prefills), default=len(parts) - 1)
        return SplitStep([self._launch(part, on_layer if i == last else None) for i, part in enumerate(parts)])

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, on_layer: Callable[[int], None] | None) -> RunningStep:
        requests = (*plan.prefills, *plan.decodes)
        rows = self._seating.rows_of(requests)
        hosted = [i for i, row in enumerate(rows) if row is None or not row.fits]
        states = self._hosted([requests[i] for i in hosted])
        parts = [state.part(i < len(plan.prefills)) for i, state in zip(hosted, states, strict=True)]
        seated = [i for i, row in enumerate(rows) if row is not None]
        of_seats = [row for row in rows if row is not None]
        num_rows = self._num_rows(plan, rows)
        begins: Sequence[int]
        commits: Tensor | None = None
        if self.graphs is not None and not plan.prefills and len(seated) == len(rows) and self.graphs.fit(of_seats):
            hidden, commits = self.graphs.run(of_seats, num_rows)
            begins = range(0, len(hidden), self.graphs.block_length)
        else:
            batch = self._packed(plan, requests, rows, dict(zip(hosted, parts, strict=True)))
            batch.fill_in(self._seating.seats.tokens)
            attention = self.attention.begin(batch.slots, batch.spans, on_layer)
            hidden = self.model(batch.token_ids, batch.positions, attention)
            if len(hosted) < len(requests):
                commits = self._unmasked(hidden, batch, num_rows)
            begins = batch.begins
        download = Download(commits) if commits is not None else None
        chosen = StepResult([])
        if hosted:
            config, device = self.model.config, self.cache.data.device
            choice = HostChoice(states, parts, [begins[i] for i in hosted], config, device)
            chosen = choice.result(choice.choose(hidden, self.model.logits))
        return RunningStep(requests, download, seated, chosen, hosted)

    def _unmasked(self, hidden: Tensor, batch: DeviceBatch, num_rows: int) -> Tensor:
        place = self.unmasker.compact(batch.seat_of, self._seating.seats, num_rows)
        shift = self.model.config.logits_shift
        index = logit_rows(place, batch.first_row, batch.least_row, LONGEST_BLOCK, shift)
        logits = self.model.logits(hidden.index_select(0, index))
        return self.unmasker.run(logits, place, batch.seat_of, self._seating.seats)

    def _num_rows(self, plan: StepPlan, rows: Sequence[Row | None]) -> int:
        """Rows of logits for what may be unmasked in seats: results of a step that still runs are not known here."""
        shift = self.model.config.logits_shift
        count = 0
        for i, (request, row) in enumerate(zip((*plan.prefills, *plan.decodes), rows, strict=True)):
            if row is not None and row.fits:
                first = i < len(plan.prefills) and commits_only_first(request, shift)
                count += 1 if first else request.block.num_masked
        return _rounded(max(count, min_rows(self.cache.data.device)))

    def _hosted(self, requests: Sequence[Request]) -> list[BlockState]:
        """What the host knows of these, and from now on of nobody else."""
        config = self.model.config
        self._states = {
            request.block: self._states.get(request.block) or BlockState(request, self.cache, config)
            for request in requests
        }
        return list(self._states.values())

    def _packed(
        self, plan: StepPlan, requests: Sequence[Request], rows: list[Row | None], parts: dict[int, Part]
    ) -> DeviceBatch:
        if self._batch is not None and not plan.prefills and rows == self._batch_rows:
            return self._batch
        num_prefills = len(plan.prefills)
        batch = DeviceBatch(requests, rows, parts, num_prefills, self.cache, self.model.config.mask_token_id)
        # One that never runs again would hold its tensors for nothing.
        runs_again = not plan.prefills and None not in rows
        self._batch, self._batch_rows = (batch, rows) if runs_again else (None, [])
        return batch


def _rounded(num_rows: int) -> int:
    """Up: Triton compiles for a size of 1, and for multiples of 16, apart from all others."""
    return -(-num_rows // _ROWS) * _ROWS
