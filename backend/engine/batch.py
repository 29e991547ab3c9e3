"""StepPlan -> one packed batch whose tokens are chosen on the host: T packed tokens, B requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from backend.attention.kv_cache import KVCache
from backend.core.step import StepPlan
from backend.engine.block_state import BlockState
from backend.engine.host_choice import HostChoice
from backend.engine.packing import Packing, min_rows
from backend.models.config import ModelConfig
from backend.sampling.sampler import Choice


class PackedBatch:
    """Whole sequences of the prefills, then what the decodes recompute, then padding.

    Args:
        states: of the plan's requests, in order.

    Attributes:
        token_ids: int64 [T], with the mask token where a position is masked.
        positions, slots: int64 [T].
    """

    def __init__(self, plan: StepPlan, states: Sequence[BlockState], cache: KVCache, config: ModelConfig) -> None:
        device, packing = cache.data.device, Packing()
        parts = [state.part(i < len(plan.prefills)) for i, state in enumerate(states)]
        first_rows = []
        for state, part in zip(states, parts, strict=True):
            begin = packing.add(part.ids, part.slots, part.positions, part.kv)
            first_rows.append(begin + state.request.block_start - int(part.positions[0]))
        self.spans = packing.spans
        self.choice = HostChoice(states, parts, packing.begins, config, device)
        self._block_rows = (np.array(first_rows)[:, None] + np.arange(self.choice.longest_block)).ravel()
        self._ids, slots, positions = packing.arrays(cache, min_rows(device))
        # On the CPU these share memory with the arrays: `write` reaches the model without a copy.
        self.token_ids = torch.from_numpy(self._ids).to(device)
        self.slots = torch.from_numpy(slots).to(device)
        self.positions = torch.from_numpy(positions).to(device)

    def write(self, choice: Choice) -> None:
        """Puts committed tokens in place for the next step of the same requests, all of them steady."""
        self._ids[self._block_rows.take(choice.places)] = choice.tokens
        if self.token_ids.device.type != "cpu":
            self.token_ids.copy_(torch.from_numpy(self._ids), non_blocking=True)
