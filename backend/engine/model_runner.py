"""Runs a step plan: packs it, one forward, unmasks, and says what was committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from backend.attention.base import AttentionBackend
from backend.attention.kv_cache import KVCache
from backend.attention.sdpa import SdpaBackend
from backend.core.block import Block
from backend.core.queries import is_steady
from backend.core.request import Request
from backend.core.step import StepPlan, StepResult
from backend.engine.batch import PackedBatch
from backend.engine.block_state import BlockState
from backend.engine.device_runner import DeviceRunner
from backend.models.layers import Transformer


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

    Here, all tokens are chosen on the host.

    Args:
        on_device: runs the steps instead, if given.
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
        self.on_device = on_device
        self._states: dict[Block, BlockState] = {}
        self._batch: PackedBatch | None = None

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
        """Begins a step, and waits for its end if tokens are chosen on the host."""
        if self.on_device is not None:
            return self.on_device.launch(plan, on_layer)
        return Ended(self.run(plan, on_layer))

    @torch.inference_mode()
    def run(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepResult:
        """One forward over the plan; `on_layer`: see `AttentionBackend`."""
        batch = self._pack(plan)
        attention = self.attention.begin(batch.slots, batch.spans, on_layer)
        hidden = self.model(batch.token_ids, batch.positions, attention)
        choice = batch.choice.choose(hidden, self.model.logits)
        result = batch.choice.result(choice)
        if result.errors:
            self.forget_batch()
        elif self._batch is batch:
            batch.write(choice)
        return result

    def _pack(self, plan: StepPlan) -> PackedBatch:
        requests = (*plan.prefills, *plan.decodes)
        blocks = [request.block for request in requests]
        if self._batch is not None and not plan.prefills and blocks == list(self._states):
            return self._batch
        config = self.model.config
        self._states = {
            request.block: self._states.get(request.block) or BlockState(request, self.cache, config)
            for request in requests
        }
        batch = PackedBatch(plan, list(self._states.values()), self.cache, config)
        # One that never runs again would hold its tensors for nothing.
        self._batch = batch if not plan.prefills and all(map(is_steady, plan.decodes)) else None
        return batch
