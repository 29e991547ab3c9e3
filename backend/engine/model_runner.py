"""Runs a step plan: packs it, one forward, unmasks, and says what was committed."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.attention.kv_cache import KVCache
from backend.attention.sdpa import SdpaAttention
from backend.core.request import Block
from backend.core.step import StepPlan, StepResult
from backend.engine.batch import BlockLayout, PackedBatch
from backend.models.llada import Llada
from backend.sampling.sampler import FAILED, choose


class ModelRunner:
    """Owns the model's forward and the KV memory. One thread at a time."""

    def __init__(self, model: Llada, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self.mask_token_id = model.config.mask_token_id
        self._min_rows = 8 * max(torch.get_num_threads(), 2) if cache.data.device.type == "cpu" else 1
        self._layouts: dict[str, BlockLayout] = {}
        self._batch: PackedBatch | None = None
        self._batch_blocks: list[Block] = []

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        batch = self._pack(plan)
        hidden = self.model(batch.token_ids, batch.positions, SdpaAttention(self.cache, batch.slots, batch.spans))
        rows, offsets = batch.is_masked.nonzero(as_tuple=True)
        logits = self._logits(hidden, batch.block_rows[rows, offsets])
        commits = choose(logits, self.mask_token_id, rows, offsets, batch.sampling)
        return self._result(plan, batch, commits)

    def _pack(self, plan: StepPlan) -> PackedBatch:
        requests = (*plan.prefills, *plan.decodes)
        blocks = [request.block for request in requests]
        if self._batch is not None and not plan.prefills and blocks == self._batch_blocks:
            return self._batch
        layouts = {}
        for request in requests:
            known = self._layouts.get(request.request_id)
            if known is None or known.block is not request.block:
                known = BlockLayout(request, self.cache)
            layouts[request.request_id] = known
        self._layouts = layouts
        batch = PackedBatch(plan, list(layouts.values()), self.cache, self.mask_token_id, self._min_rows)
        # A batch with prefills never runs again; keeping it would hold its tensors for nothing.
        self._batch, self._batch_blocks = (None, []) if plan.prefills else (batch, blocks)
        return batch

    def _logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Logits of `rows` [N] alone, computed on at least `min_rows` rows (see PackedBatch)."""
        count = rows.shape[0]
        if padding := max(self._min_rows - count, 0):
            rows = torch.cat((rows, rows.new_zeros(padding)))
        return self.model.logits(hidden[rows])[:count, : self.model.config.vocab_size]

    def _result(self, plan: StepPlan, batch: PackedBatch, commits: Tensor) -> StepResult:
        requests = (*plan.prefills, *plan.decodes)
        per_request: list[list[tuple[int, int]]] = [[] for _ in requests]
        errors: dict[str, str] = {}
        changed = False
        values = commits.tolist()
        for commit in values:
            row, offset, token = commit
            request = requests[row]
            if token == FAILED:
                position = request.block_start + offset
                errors[request.request_id] = f"the model's logits at position {position} are not finite"
            known = request.block.known
            if offset < len(known) and token != known[offset]:
                commit[2] = token = known[offset]
                changed = True
            per_request[row].append((offset, token))
        if self._batch is batch:
            if errors:
                self._batch = None
            else:
                batch.write(torch.tensor(values, device=commits.device) if changed else commits)
        return StepResult(per_request, errors)
