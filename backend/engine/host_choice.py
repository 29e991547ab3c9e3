"""The requests of a step whose tokens are chosen on the host, by rules that seats do not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.core.logprobs import TokenLogprobs
from backend.core.queries import commits_only_first
from backend.core.request import Request
from backend.sampling.sampler import SamplingBatch

Commits = list[tuple[int, int]]


class HostChoice:
    """What a step commits of some of its requests, by each one's place in the batch; chosen when this is made.

    Args:
        chosen: request's row in the batch -> request.
        first_row, least_row: by row in the batch, see `DeviceBatch`.
        logits_of: hidden states [N, D] -> logits [N, >= V].
    """

    def __init__(
        self,
        chosen: dict[int, Request],
        hidden: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        first_row: Sequence[int],
        least_row: Sequence[int],
        *,
        vocab_size: int,
        mask_token_id: int,
        logits_shift: int,
        min_rows: int,
    ) -> None:
        requests = list(chosen.values())
        only_first = np.array([commits_only_first(request, logits_shift) for request in requests])
        longest = max(request.block.length for request in requests)
        places: list[int] = []
        rows: list[int] = []
        for i, (at, request) in enumerate(chosen.items()):
            last = 1 if only_first[i] else request.block.length
            for offset in range(last):
                if request.block.tokens[offset] is None:
                    places.append(i * longest + offset)
                    rows.append(max(first_row[at] + offset - logits_shift, least_row[at]))
        masked: NDArray[np.int64] = np.array(places)
        index = torch.tensor(rows + [0] * max(min_rows - len(rows), 0)).to(hidden.device)
        logits = logits_of(hidden.index_select(0, index))[: len(rows), :vocab_size]
        sampling = SamplingBatch(requests, longest, hidden.device, only_first)
        choice = sampling.choose(logits, mask_token_id, masked)
        self.logprobs: dict[str, list[TokenLogprobs]] = sampling.logprobs(choice)
        self.commits: dict[int, Commits] = {at: [] for at in chosen}
        ats = list(chosen)
        for place, token in zip(choice.places.tolist(), choice.tokens.tolist(), strict=True):
            self.commits[ats[place // longest]].append((place % longest, token))
