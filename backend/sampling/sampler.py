"""Logits of the masked positions of a whole batch -> commits, in a handful of tensor operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backend.core.request import Request
from backend.sampling.draw import greedy, sample
from backend.sampling.unmask import by_quota, by_threshold, quota

FAILED = -1
"""Stands in the place of a token whose logits were not finite."""


class SamplingBatch:
    """The sampling options of B requests as tensors; L is the longest block among them.

    Reused from step to step while the same requests run; `steps` moves on with them.
    """

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        params = [request.params for request in requests]
        self.requests = requests
        self.shape = (len(requests), max(p.block_length for p in params))
        self.threshold = torch.tensor([p.confidence_threshold for p in params], device=device)
        quota_rows = [i for i, p in enumerate(params) if p.unmasking == "quota"]
        self.quota_rows = torch.tensor(quota_rows, device=device) if quota_rows else None
        self._quota_requests = [requests[i] for i in quota_rows]
        self.is_drawn: Tensor | None = None
        if any(p.temperature > 0 for p in params):
            self.is_drawn = torch.tensor([p.temperature > 0 for p in params], device=device)
            self.temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)
            self.seed = torch.tensor([p.seed for p in params], device=device)
            self.block = torch.tensor([request.block.index for request in requests], device=device)

    def quotas(self) -> Tensor:
        """How many positions each request of `quota_rows` commits now, int64 [Q]."""
        counts = [quota(r.block.length, r.params.steps_per_block, r.block.step) for r in self._quota_requests]
        return torch.tensor(counts, device=self.threshold.device)

    def steps(self) -> Tensor:
        return torch.tensor([request.block.step for request in self.requests], device=self.threshold.device)


def choose(logits: Tensor, mask_token_id: int, rows: Tensor, offsets: Tensor, batch: SamplingBatch) -> Tensor:
    """The commits of one step: int64 [M, 3] of (request row, offset in block, token or FAILED).

    Every request with a candidate commits at least one position, so every step makes progress; the
    mask token is never a candidate.

    Args:
        logits: [N, V] of the masked positions, overwritten.
        rows, offsets: int64 [N], to which request and position of its block each row of logits belongs.
    """
    logits = logits.float()
    logits[:, mask_token_id] = -torch.inf
    token, confidence = greedy(logits)
    if batch.is_drawn is not None:
        drawn = batch.is_drawn[rows].nonzero().squeeze(1)
        row = rows[drawn]
        counters = (batch.seed[row], batch.block[row], batch.steps()[row], offsets[drawn])
        token[drawn], confidence[drawn] = sample(logits[drawn], batch.temperature[row], counters)
    broken = confidence.isnan()
    token = token.masked_fill(broken, FAILED)
    # A broken row outranks all others, so that its request is sure to hear of it in this step.
    confidence = confidence.masked_fill(broken, 2.0)
    dense = torch.full(batch.shape, -1.0, device=logits.device)
    dense[rows, offsets] = confidence
    chosen = by_threshold(dense, batch.threshold)
    if batch.quota_rows is not None:
        chosen[batch.quota_rows] = by_quota(dense[batch.quota_rows], batch.quotas())
    picked = chosen[rows, offsets]
    return torch.stack((rows[picked], offsets[picked], token[picked]), dim=1)
