"""What steps that never leave the device know of each request: one seat for each that denoises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.core.queries import commits_only_first
from backend.core.request import Request
from backend.core.sampling_params import UNMASKING
from backend.core.unmask_schedule import shares
from backend.sampling.early_stops import has_early_stops

RULES = {name: number for number, name in enumerate(UNMASKING)}
"""The request option `unmasking` as seats hold it."""

NOTHING = -1
"""In the commits of a step: no token was committed there."""
FAILED = -2
"""In the commits of a step: a token would have been, had its logits been finite."""


class Seats:
    """The blocks and sampling options of up to M requests; L is the longest block.

    All of a seat lies in one row of memory, of which the attributes are views: so any number of seats is
    taken by one copy to the device and one scatter, and nobody waits for either.

    Args:
        num_seats: M.
        longest_block: L.
        logits_shift: see `ModelConfig`.

    Attributes:
        tokens: int64 [M, L], the mask token where masked and past the end of a shorter block.
        is_masked: bool [M, L], False past the end. A seat without masks takes no part in a step.
        known: int32 [M, L], the token that an earlier attempt already streamed there, or -1.
        block, step, length: int32 [M], the block's index, its next step, its positions.
        rule: int32 [M], see `RULES`.
        threshold: float32 [M]; `confidence_threshold`.
        factor, temperature: float64 [M].
        seed: int64 [M].
        num_steps: int32 [M], `steps_per_block`.
        by_timesteps: bool [M], whether `quota_schedule` is "timesteps".
        only_first: bool [M], whether step 0 commits the first position, whatever its score, and no other.
        shares: float32 [L + 1, L]; [n, s] is what step s of n takes of the positions left, by timesteps.
    """

    def __init__(
        self, num_seats: int, longest_block: int, device: torch.device, *, mask_token_id: int, logits_shift: int
    ) -> None:
        self.num_seats, self.longest_block, self.device = num_seats, longest_block, device
        self._mask_token_id, self._logits_shift = mask_token_id, logits_shift
        self._row = _row(longest_block)
        self._data = torch.zeros(num_seats, self.row_bytes // 8, dtype=torch.int64, device=device)
        self.tokens, self.is_masked, self.known = self._view("tokens"), self._view("is_masked"), self._view("known")
        self.block, self.step, self.length = self._view("block"), self._view("step"), self._view("length")
        self.rule, self.threshold, self.factor = self._view("rule"), self._view("threshold"), self._view("factor")
        self.temperature, self.seed = self._view("temperature"), self._view("seed")
        self.num_steps, self.by_timesteps = self._view("num_steps"), self._view("by_timesteps")
        self.only_first = self._view("only_first")
        self.tokens.fill_(mask_token_id)
        self.known.fill_(-1)
        table = np.zeros((longest_block + 1, longest_block), dtype=np.float32)
        for n in range(1, longest_block + 1):
            table[n, :n] = shares(n)
        self.shares = torch.from_numpy(table).to(device)

    @property
    def row_bytes(self) -> int:
        """From a seat to the next one, in every attribute."""
        return self._row.itemsize

    def fits(self, request: Request) -> bool:
        """Whether the block that `request` is at can be denoised in a seat.

        Not if it is longer than L, draws with top_k, top_p or min_p, has `min_tokens` ahead, or asks for
        `logprobs` or `remask_below`.
        """
        params = request.params
        truncates = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        judges_later = params.logprobs is not None or params.remask_below > 0
        is_long = params.block_length > self.longest_block
        return not (is_long or truncates or judges_later or has_early_stops(request))

    def take(self, seats: Sequence[int], requests: Sequence[Request]) -> None:
        """Seats each request, at the step where it is; who sat there is gone.

        Args:
            seats: a seat of its own for each request, all of which fit.
        """
        if not seats:
            return
        is_pinned = self.device.type == "cuda"  # torch's allocator reuses it only when the copy is done
        staged = torch.zeros(len(seats), self.row_bytes // 8, dtype=torch.int64, pin_memory=is_pinned)
        rows = staged.numpy().view(self._row)[:, 0]
        rows["seat"] = seats
        _fill(rows, requests, self._mask_token_id)
        rows["only_first"] = [commits_only_first(request, self._logits_shift) for request in requests]
        on_device = staged.to(self.device, non_blocking=True)
        self._data.index_copy_(0, on_device[:, 0], on_device)

    def leave(self, seats: Sequence[int]) -> None:
        """Nothing stays masked there: these seats take no part in the steps to come."""
        index = torch.tensor(seats, dtype=torch.int64)
        if self.device.type == "cuda":
            index = index.pin_memory().to(self.device, non_blocking=True)
        self.is_masked.index_fill_(0, index, False)

    def _view(self, field: str) -> Tensor:
        dtype, start = self._row.fields[field][:2]  # type: ignore[index]
        base, shape = (dtype.base, dtype.shape)
        of_field = self._data.view(torch.uint8)[:, start : start + dtype.itemsize]
        typed = of_field.view(torch.from_numpy(np.empty(0, dtype=base)).dtype)
        return typed if shape else typed[:, 0]


def _row(longest_block: int) -> np.dtype[Any]:
    """One seat's memory: the fields of `Seats`, and first, where a row lies on its way, the seat's number."""
    per_position = [("tokens", np.int64), ("known", np.int32), ("is_masked", np.bool_)]
    of_seat = [("seat", np.int64), ("seed", np.int64), ("factor", np.float64), ("temperature", np.float64)]
    counts = ["block", "step", "length", "rule", "num_steps"]
    return np.dtype(
        [
            *of_seat,
            ("threshold", np.float32),
            *((name, np.int32) for name in counts),
            ("by_timesteps", np.bool_),
            ("only_first", np.bool_),
            *((name, kind, (longest_block,)) for name, kind in per_position),
        ],
        align=True,
    )


def _fill(rows: NDArray[Any], requests: Sequence[Request], mask_token_id: int) -> None:
    rows["tokens"], rows["known"], rows["is_masked"] = mask_token_id, -1, False
    blocks, params = [request.block for request in requests], [request.params for request in requests]
    for row, block in zip(rows, blocks, strict=True):
        row["is_masked"][: block.length] = [token is None for token in block.tokens]
        row["tokens"][: block.length] = [mask_token_id if token is None else token for token in block.tokens]
        row["known"][: len(block.known)] = block.known
    rows["block"] = [block.index for block in blocks]
    rows["step"] = [block.step for block in blocks]
    rows["length"] = [block.length for block in blocks]
    rows["rule"] = [RULES[p.unmasking] for p in params]
    rows["threshold"] = [p.confidence_threshold for p in params]
    rows["factor"] = [p.factor for p in params]
    rows["temperature"] = [p.temperature for p in params]
    rows["seed"] = [p.seed for p in params]
    rows["num_steps"] = [p.steps_per_block for p in params]
    rows["by_timesteps"] = [p.quota_schedule == "timesteps" for p in params]
