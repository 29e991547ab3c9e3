"""One whole unmasking step on the device, logits and seats -> commits: the host waits for nothing.

What `SamplingBatch` does from the host. B requests in a batch, L positions in the longest block, R rows of
logits, M seats. A place is `request's row in the batch * L + offset in its block`.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from backend.sampling.dense_unmask import candidates, compact, unmask
from backend.sampling.seats import Seats


class FusedUnmasker:
    """Unmasks batch after batch in memory of its own: its calls can be captured in a CUDA graph.

    The kernels of `triton_unmask` on a GPU and under Triton's interpreter, torch elsewhere. The first call
    with tensors of a kind compiles them: make it before the capture. What else is in the batch changes
    nothing in a request's tokens. `SamplingBatch` finds the same ones, but for scores whose order hangs on
    float32's last digit: take one of the two for all steps of a request.

    Args:
        max_rows: the most rows of logits in a step.
        max_batch: the most requests in a step.
        longest_block: L, as of the seats.
        vocab_size: logits have so many columns at least; others are padding.
        mask_token_id: never a candidate.
        use_triton: None as described above.
    """

    def __init__(
        self,
        max_rows: int,
        max_batch: int,
        longest_block: int,
        device: torch.device,
        *,
        vocab_size: int,
        mask_token_id: int,
        use_triton: bool | None = None,
    ) -> None:
        self._vocab_size, self._mask_token_id = vocab_size, mask_token_id
        self._longest_block = longest_block
        self._place = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self._all_places = torch.arange(max_batch * longest_block, dtype=torch.int32, device=device)
        self._commits = torch.full((max_batch, longest_block), -1, dtype=torch.int32, device=device)
        if use_triton is None:
            use_triton = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
        self._kernels = None
        if use_triton:
            # Not on the way of those who have no use for Triton.
            from backend.sampling.triton_unmask import UnmaskKernels

            self._kernels = UnmaskKernels(max_rows, max_batch, longest_block, vocab_size, mask_token_id, device)

    def all_places(self, batch: int) -> Tensor:
        """The places of all positions of `batch` requests, int32 [batch * L]: for logits of whole blocks."""
        return self._all_places[: batch * self._longest_block]

    def compact(self, seat_of: Tensor, seats: Seats, num_rows: int) -> Tensor:
        """The places where a token may be unmasked, ascending, then -1: int32 [num_rows].

        Overwritten by the next call.

        Args:
            seat_of: int32 [B], the seat of each request of the batch. Rows that pad it have a seat without
                masks, which they may share.
            num_rows: at least the number of these places; those beyond it are left out, and would be
                unmasked by what was last said of them.
        """
        place = self._place[:num_rows]
        if self._kernels is not None:
            self._kernels.compact(place, seat_of, seats)
        else:
            place.copy_(compact(candidates(seats, seat_of.long()), num_rows))
        return place

    def run(self, logits: Tensor, place: Tensor, seat_of: Tensor, seats: Seats) -> Tensor:
        """Unmasks one step, and puts the commits and the next step's number into the seats.

        A request whose logits are not finite where it may unmask fails: at least one such position is
        among its commits, and its seat is left without masks.

        Args:
            logits: [R, >= vocab_size], float32, float16 or bfloat16; columns next to each other.
            place: int32 [R], the place that each row predicts, or -1. Every position that may be unmasked
                (see `compact`) has a row; rows of other positions are not read.
            seat_of: see `compact`.

        Returns:
            int32 [B, L]: the token that is committed there, NOTHING or FAILED. Overwritten by the next call.

        Raises:
            ValueError: more rows or requests than this was made for.
        """
        max_batch, max_rows = len(self._commits), len(self._place)
        if len(seat_of) > max_batch or len(logits) > max_rows or logits.shape[1] < self._vocab_size:
            raise ValueError(
                f"{len(logits)} x {logits.shape[1]} logits of {len(seat_of)} requests; made for at most {max_rows} "
                f"rows of {max_batch} requests, and at least {self._vocab_size} columns"
            )
        commits = self._commits[: len(seat_of)]
        if self._kernels is not None:
            self._kernels.unmask(logits, place, seat_of, seats, commits)
        else:
            places, of_seats = place.long(), seat_of.long()
            commits.copy_(unmask(logits[:, : self._vocab_size], places, of_seats, seats, self._mask_token_id))
        return commits
