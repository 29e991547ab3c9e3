"""Before `min_tokens` no token may end the answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.core.request import Request


class EarlyStops:
    """Takes stop tokens out of the candidates at the first `min_tokens` positions of B requests."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        # Offsets below this one, in each request's current block.
        limits = [_num_early(request) for request in requests]
        self._limits = np.array(limits)
        stop_ids = [
            request.params.stop_token_ids if limit else (0,) for request, limit in zip(requests, limits, strict=True)
        ]
        longest = max(map(len, stop_ids))
        padded = [(*ids, *ids[:1] * (longest - len(ids))) for ids in stop_ids]
        self._stop_ids = torch.tensor(padded, device=device)

    def ban(self, logits: Tensor, rows: NDArray[np.int64], offsets: NDArray[np.int64]) -> None:
        """Sets `logits` [N, V] to -inf in place; `rows` and `offsets` [N]: request, and where in its block."""
        early = (offsets < self._limits[rows]).nonzero()[0]
        if len(early):
            index = torch.from_numpy(early).to(logits.device)
            logits[index[:, None], self._stop_ids[rows[early]]] = -torch.inf


def has_early_stops(request: Request) -> bool:
    return request.params.min_tokens > 0 and _num_early(request) > 0


def _num_early(request: Request) -> int:
    params = request.params
    return max(params.min_tokens - len(request.response), 0) if params.stop_token_ids else 0
