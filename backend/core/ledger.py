"""What the router has charged to each worker, released exactly once whatever the order of messages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from backend.core.routing import WorkerId, WorkerLoad

Dispatch = tuple[str, int, int]
"""(request id, block index, attempt number)."""


@dataclass
class _Charge:
    worker_id: WorkerId
    prefill_tokens: int


class Ledger:
    """Outstanding prefill tokens (o_w) and blocks in flight per worker, keyed by dispatch."""

    def __init__(self) -> None:
        self._charges: dict[Dispatch, _Charge] = {}
        self._outstanding: dict[WorkerId, int] = {}
        self._requests: dict[WorkerId, int] = {}

    def charge(self, dispatch: Dispatch, worker_id: WorkerId, prefill_tokens: int) -> None:
        """Raises ValueError if this dispatch is charged already: an attempt is dispatched once."""
        if dispatch in self._charges:
            raise ValueError(f"{dispatch} is charged already")
        self._charges[dispatch] = _Charge(worker_id, prefill_tokens)
        self._outstanding[worker_id] = self._outstanding.get(worker_id, 0) + prefill_tokens
        self._requests[worker_id] = self._requests.get(worker_id, 0) + 1

    def prefilled(self, dispatch: Dispatch) -> None:
        """Releases o_w once that prefill's forward has run; late and repeated news change nothing."""
        charge = self._charges.get(dispatch)
        if charge is not None:
            self._outstanding[charge.worker_id] -= charge.prefill_tokens
            charge.prefill_tokens = 0

    def done(self, dispatch: Dispatch) -> None:
        """Releases all that this dispatch still holds: it ended, failed or its worker died."""
        self.prefilled(dispatch)
        charge = self._charges.pop(dispatch, None)
        if charge is not None:
            self._requests[charge.worker_id] -= 1
            if not self._requests[charge.worker_id]:
                del self._requests[charge.worker_id], self._outstanding[charge.worker_id]

    def loads(self, workers: Collection[WorkerId]) -> list[WorkerLoad]:
        return [WorkerLoad(w, self._outstanding.get(w, 0), self._requests.get(w, 0)) for w in workers]

    @property
    def outstanding_prefill_tokens(self) -> dict[WorkerId, int]:
        return dict(self._outstanding)
