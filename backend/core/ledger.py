"""What the router has charged to each worker, released exactly once whatever the order of messages."""

from __future__ import annotations

from dataclasses import dataclass

from backend.core.worker_pool import WorkerLoad

Dispatch = tuple[str, int, int]
"""(request id, block index, attempt number)."""


@dataclass(slots=True)
class _Charge:
    """What one dispatch holds: at most one prefill, one promise and one place to be denoised.

    The accounts themselves, not worker ids: a worker that is lost and comes back starts a new one.
    """

    prefill: WorkerLoad | None = None
    prefill_tokens: int = 0
    prefill_pages: int = 0
    promise: WorkerLoad | None = None
    promised_pages: int = 0
    decode: WorkerLoad | None = None
    decode_pages: int = 0


class Ledger:
    """Outstanding prefill tokens (o_w), pages and promised pages of all dispatches in flight.

    What is said about a dispatch that is not in the ledger, or said twice, changes nothing.
    """

    def __init__(self) -> None:
        self._charges: dict[Dispatch, _Charge] = {}

    def __len__(self) -> int:
        return len(self._charges)

    def __contains__(self, dispatch: Dispatch) -> bool:
        return dispatch in self._charges

    def place(self, dispatch: Dispatch, load: WorkerLoad, num_tokens: int) -> None:
        """Charges a prefill: its tokens until it has run, its pages until they are free.

        Raises ValueError if this dispatch is charged already: an attempt is dispatched once.
        """
        if dispatch in self._charges:
            raise ValueError(f"{dispatch} is charged already")
        pages = load.pages_for(num_tokens)
        self._charges[dispatch] = _Charge(load, num_tokens, pages)
        load.change(tokens=num_tokens, prefills=1, requests=1, used=pages)

    def prefilled(self, dispatch: Dispatch) -> WorkerLoad | None:
        """That prefill's forward has run; the worker whose o_w fell, if it did."""
        charge = self._charges.get(dispatch)
        if charge is None or charge.prefill is None or not charge.prefill_tokens:
            return None
        charge.prefill.change(tokens=-charge.prefill_tokens, prefills=-1)
        charge.prefill_tokens = 0
        return charge.prefill

    def promise(self, dispatch: Dispatch, load: WorkerLoad, num_tokens: int) -> None:
        """Keeps pages of `load` free for a pending decode; a promise elsewhere is taken back."""
        charge = self._charges[dispatch]
        self._take_back(charge)
        charge.promise, charge.promised_pages = load, load.pages_for(num_tokens)
        load.change(promised=charge.promised_pages)

    def reserve(self, dispatch: Dispatch, load: WorkerLoad, num_tokens: int) -> None:
        """A pending decode gets its pages on `load`; its promise is kept or taken back.

        Raises ValueError if it has pages to be denoised in already.
        """
        charge = self._charges[dispatch]
        if charge.decode is not None:
            raise ValueError(f"{dispatch} has its place already")
        kept = 0
        if charge.promise is load:
            charge.promise, kept = None, charge.promised_pages
        self._take_back(charge)
        charge.decode, charge.decode_pages = load, load.pages_for(num_tokens)
        load.change(requests=1, used=charge.decode_pages, promised=-kept)

    def unpromise(self, dispatch: Dispatch) -> None:
        """Takes a promise back without another one."""
        self._take_back(self._charges[dispatch])

    def source_freed(self, dispatch: Dispatch) -> WorkerLoad | None:
        """The prefill worker has freed its pages; the worker they belong to, if they were charged."""
        charge = self._charges.get(dispatch)
        if charge is None or charge.prefill is None:
            return None
        load, tokens = charge.prefill, charge.prefill_tokens
        charge.prefill, charge.prefill_tokens = None, 0
        load.change(tokens=-tokens, prefills=-1 if tokens else 0, requests=-1, used=-charge.prefill_pages)
        return load

    def done(self, dispatch: Dispatch) -> list[WorkerLoad]:
        """Releases all that this dispatch still holds: it ended, failed or its worker died."""
        charge = self._charges.get(dispatch)
        if charge is None:
            return []
        touched = [load for load in (charge.prefill, charge.promise, charge.decode) if load is not None]
        self.source_freed(dispatch)
        self._take_back(charge)
        if charge.decode is not None:
            charge.decode.change(requests=-1, used=-charge.decode_pages)
        del self._charges[dispatch]
        return touched

    @staticmethod
    def _take_back(charge: _Charge) -> None:
        if charge.promise is not None:
            charge.promise.change(promised=-charge.promised_pages)
            charge.promise = None
