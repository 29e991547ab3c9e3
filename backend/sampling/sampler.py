"""Logits of the masked positions of a whole batch -> commits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.core.request import Request
from backend.sampling.draw import sample, top_probability
from backend.sampling.unmask import by_quota, by_threshold, quota

FAILED = -1
"""Stands in the place of a token whose logits were not finite."""


class SamplingBatch:
    """The sampling options of B requests; kept from step to step while the same requests run."""

    def __init__(self, requests: Sequence[Request], longest_block: int, device: torch.device) -> None:
        params = [request.params for request in requests]
        self._requests = requests
        self._device = device
        self._shape = (len(requests), longest_block)
        # No confidence reaches 2: a quota row gets its best position by the threshold rule, and the
        # rest of its quota, if there is more, by rank.
        self._threshold = np.array(
            [p.confidence_threshold if p.unmasking == "threshold" else 2.0 for p in params], dtype=np.float32
        )
        self._quota_rows = [i for i, p in enumerate(params) if p.unmasking == "quota"]
        self._is_drawn = None
        if any(p.temperature > 0 for p in params):
            self._is_drawn = np.array([p.temperature > 0 for p in params])
            self._temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)
            self._seed = torch.tensor([p.seed for p in params], device=device)
            self._block = torch.tensor([request.block.index for request in requests], device=device)

    def choose(
        self, logits: Tensor, mask_token_id: int, masked: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The commits of one step: places [M] and tokens [M], or FAILED.

        A place is `request row * L + offset in its block`. Every request with a masked position
        commits at least one, so every step makes progress; the mask token is never a candidate.

        Args:
            logits: [N, V] of the masked positions, overwritten.
            masked: the place of each row of logits, [N], ascending.
        """
        logits = logits.float()
        logits[:, mask_token_id] = -torch.inf
        confidence = top_probability(logits)
        drawn = self._draw(logits, confidence, masked)
        likelihood = confidence.numpy(force=True)
        broken = None
        if not np.isfinite(likelihood.sum()):
            # A broken row outranks all others, so that its request is sure to hear of it in this step.
            broken = np.isnan(likelihood)
            likelihood[broken] = 3.0
        dense = np.full(self._shape, -1.0, dtype=np.float32)
        dense.ravel()[masked] = likelihood
        chosen = by_threshold(dense, self._threshold)
        if self._quota_rows:
            counts = [self._quota(row) for row in self._quota_rows]
            if max(counts) > 1:
                chosen[self._quota_rows] = by_quota(dense[self._quota_rows], np.array(counts))
        picked = chosen.ravel().take(masked).nonzero()[0]
        # The arg max is only wanted where it is committed; ties go to the lower id.
        index = torch.from_numpy(picked).to(self._device)
        tokens = logits.index_select(0, index).argmax(dim=-1).numpy(force=True)
        if drawn is not None:
            tokens = np.where(drawn[picked] >= 0, drawn[picked], tokens)
        if broken is not None:
            tokens[broken[picked]] = FAILED
        return masked[picked], tokens

    def _quota(self, row: int) -> int:
        request = self._requests[row]
        return quota(request.block.length, request.params.steps_per_block, request.block.step)

    def _draw(self, logits: Tensor, confidence: Tensor, masked: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Tokens [N] of the requests with a temperature, -1 elsewhere; puts their `confidence` in place."""
        if self._is_drawn is None:
            return None
        rows, offsets = np.divmod(masked, self._shape[1])
        which = self._is_drawn[rows].nonzero()[0]
        drawn, row, position = (
            torch.from_numpy(index).to(self._device) for index in (which, rows[which], offsets[which])
        )
        step = torch.tensor([request.block.step for request in self._requests], device=self._device)
        counters = (self._seed[row], self._block[row], step[row], position)
        token, confidence[drawn] = sample(logits[drawn], self._temperature[row], counters)
        tokens = np.full(len(masked), -1)
        tokens[which] = token.numpy(force=True)
        return tokens
