"""Runs a step plan: packs it, one forward, unmasks, and says what was committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.attention.base import AttentionBackend
from backend.attention.kv_cache import KVCache
from backend.attention.sdpa import SdpaBackend
from backend.core.block import Block
from backend.core.queries import is_steady
from backend.core.request import Request
from backend.core.step import StepPlan, StepResult
from backend.engine.batch import BlockState, PackedBatch, min_rows
from backend.engine.device_runner import DeviceRunner
from backend.models.layers import Transformer
from backend.sampling.sampler import FAILED, Choice


class Pending(Protocol):
    """A step that may still be running."""

    def result(self) -> StepResult:
        """Waits for its end."""
        ...


class Ended(NamedTuple):
    """A step that has been waited for."""

    of: StepResult

    def result(self) -> StepResult:
        return self.of


class ModelRunner:
    """Owns the model's forward and the KV memory. One thread at a time.

    Here, tokens are chosen on the host, by any rule and for any cache policy.

    Args:
        on_device: runs the steps of plain requests, if given.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        attention: AttentionBackend | None = None,
        on_device: DeviceRunner | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.attention = attention or SdpaBackend(cache)
        self.mask_token_id = model.config.mask_token_id
        self._min_rows = min_rows(cache.data.device)
        self.on_device = on_device
        self._states: dict[str, BlockState] = {}
        self._batch: PackedBatch | None = None
        self._batch_blocks: list[Block] = []

    @property
    def last_batch(self) -> PackedBatch | None:
        """The batch that the next step runs again if its requests are the same."""
        return self._batch

    def forget_batch(self) -> None:
        """Makes the next step pack anew."""
        self._batch = None

    def is_plain(self, request: Request) -> bool:
        """Whether a step of this request can be launched before the result of the one before is known."""
        return self.on_device is not None and self.on_device.is_plain(request)

    def launch(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> Pending:
        """Begins a step, and waits for its end unless all its requests are plain."""
        if self.on_device is None:
            return Ended(self.run(plan, on_layer))
        if self.on_device.takes(plan):
            self._states = {}
            self.forget_batch()
            return self.on_device.launch(plan, on_layer)
        self.on_device.forget((*plan.prefills, *plan.decodes))
        return Ended(self.run(plan, on_layer))

    @torch.inference_mode()
    def run(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepResult:
        """One forward over the plan; `on_layer`: see `AttentionBackend`."""
        batch = self._pack(plan)
        attention = self.attention.begin(batch.slots, batch.spans, on_layer)
        hidden = self.model(batch.token_ids, batch.positions, attention)
        masked = batch.masked_places()
        logits = self._logits(hidden, batch.logit_rows(masked))
        choice = batch.sampling.choose(logits, self.mask_token_id, masked)
        return self._result(plan, batch, choice)

    def _pack(self, plan: StepPlan) -> PackedBatch:
        requests = (*plan.prefills, *plan.decodes)
        blocks = [request.block for request in requests]
        if self._batch is not None and not plan.prefills and blocks == self._batch_blocks:
            return self._batch
        states = {}
        for request in requests:
            known = self._states.get(request.request_id)
            if known is None or known.block is not request.block:
                known = BlockState(request, self.cache, self.mask_token_id)
            states[request.request_id] = known
        self._states = states
        shift = self.model.config.logits_shift
        batch = PackedBatch(plan, list(states.values()), self.cache, self.mask_token_id, shift, self._min_rows)
        # One that never runs again would hold its tensors for nothing.
        runs_again = not plan.prefills and all(map(is_steady, plan.decodes))
        self._batch, self._batch_blocks = (batch, blocks) if runs_again else (None, [])
        return batch

    def _logits(self, hidden: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Logits of `rows` [N] alone, computed on at least `min_rows` rows (see PackedBatch)."""
        count = len(rows)
        if count < self._min_rows:
            rows = np.concatenate((rows, np.zeros(self._min_rows - count, dtype=np.int64)))
        index = torch.from_numpy(rows).to(hidden.device)
        return self.model.logits(hidden.index_select(0, index))[:count, : self.model.config.vocab_size]

    def _result(self, plan: StepPlan, batch: PackedBatch, choice: Choice) -> StepResult:
        places, tokens = choice.places, choice.tokens
        requests = (*plan.prefills, *plan.decodes)
        states = list(self._states.values())
        per_request: list[list[tuple[int, int]]] = [[] for _ in requests]
        errors: dict[str, str] = {}
        for i, (place, token) in enumerate(zip(places.tolist(), tokens.tolist(), strict=True)):
            row, offset = divmod(place, batch.longest_block)
            request = requests[row]
            if token == FAILED:
                position = request.block_start + offset
                errors[request.request_id] = f"the model's logits at position {position} are not finite"
            elif offset < len(request.block.known):
                token = tokens[i] = request.block.known[offset]
            per_request[row].append((offset, token))
            states[row].commit(offset, token)
        if self._batch is batch:
            if errors:
                self.forget_batch()
            else:
                batch.write(places, tokens)
        return StepResult(per_request, errors, batch.sampling.logprobs(choice))
