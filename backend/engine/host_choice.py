"""The requests of a step whose tokens are chosen on the host, by any rule and for any cache policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from backend.core.step import StepResult
from backend.engine.block_state import BlockState, Part
from backend.engine.packing import Ints, min_rows
from backend.models.config import ModelConfig
from backend.sampling.sampler import FAILED, Choice, SamplingBatch


class HostChoice:
    """B requests, L the longest block among them; good for as many steps as their parts stay what they are.

    Args:
        states: of each request; told what is committed.
        parts: what the step computes of each.
        begins: the packed row of each one's first query.

    Attributes:
        longest_block: L.
    """

    def __init__(
        self,
        states: Sequence[BlockState],
        parts: Sequence[Part],
        begins: Sequence[int],
        config: ModelConfig,
        device: torch.device,
    ) -> None:
        self._states = states
        self._config, self._min_rows = config, min_rows(device)
        self._requests = [state.request for state in states]
        self.longest_block = max(request.block.length for request in self._requests)
        shape = (len(parts), self.longest_block)
        logit_rows, is_masked = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
        for i, part in enumerate(parts):
            length = len(part.is_masked)
            logit_rows[i, :length] = part.logit_rows
            is_masked[i, :length] = part.is_masked
        self._logit_rows = (logit_rows + np.array(begins)[:, None]).ravel()
        self._is_masked = is_masked.ravel()
        only_first = np.array([part.only_first for part in parts])
        self._sampling = SamplingBatch(self._requests, self.longest_block, device, only_first)

    def logit_rows(self) -> Ints:
        """The packed rows whose logits the next step needs, by place: see `Choice`."""
        return self._logit_rows[self._is_masked]

    def choose(self, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Choice:
        """What the step commits of its hidden states [T, D]; `logits_of` is the LM head, [N, D] -> [N, >= V]."""
        places = self._is_masked.nonzero()[0]
        rows = self._logit_rows.take(places)
        count = len(rows)
        if count < self._min_rows:
            rows = np.concatenate((rows, np.zeros(self._min_rows - count, dtype=np.int64)))
        index = torch.from_numpy(rows).to(hidden.device)
        logits = logits_of(hidden.index_select(0, index))[:count, : self._config.vocab_size]
        choice = self._sampling.choose(logits, self._config.mask_token_id, places)
        self._is_masked[choice.places] = False
        return choice

    def result(self, choice: Choice) -> StepResult:
        """The same by request; logits that are not finite fail theirs."""
        per_request: list[list[tuple[int, int]]] = [[] for _ in self._requests]
        errors: dict[str, str] = {}
        for place, token in zip(choice.places.tolist(), choice.tokens.tolist(), strict=True):
            row, offset = divmod(place, self.longest_block)
            if token == FAILED:
                request = self._requests[row]
                errors[request.request_id] = not_finite(request.block_start + offset)
            per_request[row].append((offset, token))
            self._states[row].commit(offset, token)
        return StepResult(per_request, errors, self._sampling.logprobs(choice))


def not_finite(position: int) -> str:
    """Why a request failed."""
    return f"the model's logits at position {position} are not finite"
