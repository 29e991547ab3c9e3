"""StepPlan -> one packed batch of tensors. T packed tokens, B requests, L the longest block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backend.attention.kv_cache import KVCache
from backend.attention.sdpa import SequenceSpan
from backend.core.request import Request
from backend.core.step import StepPlan
from backend.sampling.sampler import SamplingBatch


class BlockLayout:
    """What stays the same for a request as long as it denoises one block."""

    def __init__(self, request: Request, cache: KVCache) -> None:
        self.block = request.block
        device = cache.data.device
        start, end = request.block_start, request.block_start + request.block.length
        self.context = cache.slots(request.pages, request.sequence_length)
        if isinstance(self.context, slice):
            first = self.context.start
            self.all_slots = torch.arange(first, first + request.sequence_length, device=device)
        else:
            self.all_slots = self.context
        self.block_slots = self.all_slots[start:end]
        self.block_positions = torch.arange(start, end, device=device)


class PackedBatch:
    """Whole sequences of the prefills, then current blocks of the decodes, then padding.

    Padded to `min_rows` tokens: matrix products of very few rows take another path in the BLAS
    libraries, whose rounding would make a lone request's tokens differ from the same request's in
    a batch.

    Attributes:
        block_rows: int64 [B, L], the packed row of each block position.
        is_masked: bool [B, L].
    """

    def __init__(
        self, plan: StepPlan, layouts: Sequence[BlockLayout], cache: KVCache, mask_token_id: int, min_rows: int
    ) -> None:
        device = cache.data.device
        requests = (*plan.prefills, *plan.decodes)
        self.sampling = SamplingBatch(requests, device)
        ids: list[int] = []
        slots: list[Tensor] = []
        positions: list[Tensor] = []
        self.spans: list[SequenceSpan] = []
        first_rows: list[int] = []
        masked: list[list[bool]] = []
        longest = self.sampling.shape[1]
        num_prefills = len(plan.prefills)
        for i, (request, layout) in enumerate(zip(requests, layouts, strict=True)):
            begin = len(ids)
            tokens = request.block.tokens
            if i < num_prefills:
                ids += request.prompt
                ids += request.response
                first_rows.append(len(ids))
                ids += [mask_token_id] * (request.sequence_length - len(ids) + begin)
                slots.append(layout.all_slots)
                positions.append(torch.arange(request.sequence_length, device=device))
                self.spans.append(SequenceSpan(begin, len(ids), None))
            else:
                first_rows.append(begin)
                ids += [mask_token_id if token is None else token for token in tokens]
                slots.append(layout.block_slots)
                positions.append(layout.block_positions)
                self.spans.append(SequenceSpan(begin, len(ids), layout.context))
            masked.append([token is None for token in tokens] + [False] * (longest - len(tokens)))
        if padding := max(min_rows - len(ids), 0):
            ids += [0] * padding
            slots.append(torch.full((padding,), cache.scratch_slot, device=device))
            positions.append(torch.zeros(padding, dtype=torch.int64, device=device))
        self.token_ids = torch.tensor(ids, device=device)
        self.slots = torch.cat(slots)
        self.positions = torch.cat(positions)
        rows = torch.tensor(first_rows, device=device)[:, None]
        self.block_rows = rows + torch.arange(longest, device=device)
        self.is_masked = torch.tensor(masked, device=device)

    def write(self, commits: Tensor) -> None:
        """Puts the tokens of `commits` [M, 3] in place for the next step of the same requests."""
        rows, offsets, tokens = commits.unbind(1)
        self.token_ids[self.block_rows[rows, offsets]] = tokens
        self.is_masked[rows, offsets] = False
