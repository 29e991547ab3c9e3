"""The router's brain: which block goes where and when. No I/O and no clock; live router and simulator share it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from backend.core.first_fit import FirstFit
from backend.core.ledger import Dispatch, Ledger
from backend.core.routing import Policy, Prefill, Route, RouteKind
from backend.core.worker_pool import WorkerLoad, WorkerPool


@dataclass(eq=False, slots=True)
class _Pending:
    """A pending decode: prefilled, and waiting for memory of a colocated worker."""

    dispatch: Dispatch
    num_tokens: int
    promised_by: WorkerLoad | None = None


_Place = tuple[float, int, _Pending]
"""Pending decodes in order of their request's arrival; the number tells equal ones apart."""


class Placer:
    """Places prefills by a policy, and what they leave to be denoised by free memory (paper section 4.2).

    A prefill that finds no worker waits in one central FIFO, whose head is tried again whenever load
    or memory frees anywhere. A finished prefill waits for memory of a colocated worker as a pending
    decode: the roomiest worker promises it pages, so that no later prefill takes them; it goes there
    or wherever else room comes up first. Each worker keeps its promises in order of arrival; memory
    that it has not promised goes to the earliest pending decode that fits. Where a policy queues
    prefills at a worker without regard to its memory, decodes promised memory there are queued first.

    Args:
        assign: called once for each decision, with the dispatch and its route. It must not call back.
    """

    def __init__(self, policy: Policy, assign: Callable[[Dispatch, Route], None]) -> None:
        self._policy = policy
        self._assign = assign
        self.prefill_pool = WorkerPool()
        self.colocated_pool = WorkerPool()
        self.ledger = Ledger()
        self._fifo: OrderedDict[Dispatch, Prefill] = OrderedDict()
        self._stranded: dict[Dispatch, Prefill] = {}
        self._prefilling: dict[Dispatch, Prefill] = {}
        """Assigned to prefill workers and not handed over yet."""
        self._pending: FirstFit[_Place] = FirstFit()  # sizes: less tokens is more
        self._place_of: dict[Dispatch, _Place] = {}
        self._promised: dict[WorkerLoad, list[_Place]] = {}
        self._num_handed_over = 0
        self.num_overflows = 0

    @property
    def num_queued(self) -> int:
        """Prefills in the central FIFO, those included that no worker can hold at present."""
        return len(self._fifo) + len(self._stranded)

    @property
    def num_pending_decodes(self) -> int:
        return len(self._pending)

    # Workers.

    def show(self, load: WorkerLoad, pool: WorkerPool) -> None:
        """The worker may be given work from now on."""
        pool.add(load)
        if pool is self.colocated_pool:
            fitting = [d for d, prefill in self._stranded.items() if load.capacity_tokens >= prefill.num_tokens]
            for dispatch in fitting:
                self._fifo[dispatch] = self._stranded.pop(dispatch)
            for place in [place for place in self._pending if place[2].promised_by is None]:
                self._settle(place)
        self._freed(load)

    def hide(self, load: WorkerLoad) -> None:
        """The worker gets no more work: it drains, is suspect or lost. What it has is not touched."""
        if load.pool is None:
            return
        load.pool.remove(load)
        for place in self._promised.pop(load, ()):
            self.ledger.unpromise(place[2].dispatch)
            place[2].promised_by = None
            self._settle(place)
        self._serve_fifo()

    # Blocks.

    def submit(self, dispatch: Dispatch, prefill: Prefill) -> None:
        """Places an arrival or a refresh, now or in its turn.

        Raises ValueError if it is here already: an attempt is submitted once.
        """
        if dispatch in self._fifo or dispatch in self._stranded or dispatch in self.ledger:
            raise ValueError(f"{dispatch} is here already")
        self._fifo[dispatch] = prefill
        if len(self._fifo) == 1:
            self._serve_fifo()

    def is_stranded(self, dispatch: Dispatch) -> bool:
        """Whether this waits, for its prefill or as a pending decode, and no worker here could ever hold it."""
        place = self._place_of.get(dispatch)
        return dispatch in self._stranded or (place is not None and place[2].promised_by is None)

    def prefilled(self, dispatch: Dispatch) -> None:
        """The prefill's forward has run: o_w falls."""
        if self.ledger.prefilled(dispatch) is not None:
            self._serve_fifo()

    def hand_over(self, dispatch: Dispatch) -> None:
        """A prefill worker holds the KV of an unfinished block: a colocated worker has to take it."""
        prefill = self._prefilling.pop(dispatch, None)
        if prefill is None:
            self.prefilled(dispatch)
            return
        load = self.ledger.prefilled(dispatch)
        self._num_handed_over += 1
        place = (prefill.arrival_time, self._num_handed_over, _Pending(dispatch, prefill.num_tokens))
        self._pending.add(place, -prefill.num_tokens)
        self._place_of[dispatch] = place
        self._settle(place)  # before the FIFO: memory is for pending decodes first
        if load is not None:
            self._serve_fifo()

    def hand_over_early(self, dispatch: Dispatch) -> bool:
        """As `hand_over`, while the prefill still runs: only if a colocated worker has room for it now.

        Its tokens count on until `prefilled`. False: nothing has changed.
        """
        prefill = self._prefilling.get(dispatch)
        load = self.colocated_pool.roomiest(prefill.num_tokens) if prefill is not None else None
        if prefill is None or load is None or load.available_tokens < prefill.num_tokens:
            return False
        del self._prefilling[dispatch]
        self.ledger.reserve(dispatch, load, prefill.num_tokens)
        self._assign(dispatch, Route(load, RouteKind.DECODE))
        return True

    def source_freed(self, dispatch: Dispatch) -> None:
        """The prefill worker's pages are free: pulled, released, or their lease ended."""
        load = self.ledger.source_freed(dispatch)
        if load is not None:
            self._freed(load)

    def done(self, dispatch: Dispatch) -> None:
        """The dispatch ended, failed, was lost or withdrawn, wherever it was: all it held is free."""
        self._fifo.pop(dispatch, None)
        self._stranded.pop(dispatch, None)
        self._prefilling.pop(dispatch, None)
        place = self._place_of.get(dispatch)
        if place is not None:
            self._forget(place)
        self._freed(*self.ledger.done(dispatch))

    # Decisions.

    def _serve_fifo(self) -> None:
        while self._fifo:
            dispatch, prefill = next(iter(self._fifo.items()))
            if self.colocated_pool.capacity_tokens < prefill.num_tokens:
                self._stranded[dispatch] = self._fifo.pop(dispatch)  # lest it blocks the others for ever
                continue
            route = self._policy.route(prefill, self.prefill_pool, self.colocated_pool)
            if route is None:
                return
            del self._fifo[dispatch]
            if route.kind is RouteKind.PREFILL:
                self._prefilling[dispatch] = prefill
            else:
                self.num_overflows += len(self.prefill_pool) > 0
                self._deliver_promised(route.load)
            self.ledger.place(dispatch, route.load, prefill.num_tokens)
            self._assign(dispatch, route)

    def _freed(self, *loads: WorkerLoad) -> None:
        """Load or memory of workers came free: pending decodes first, then prefills."""
        freed = [load for load in loads if load.pool is self.colocated_pool]
        while freed and self._pending:
            load = freed.pop()
            self._keep_promises(load)
            while (room := load.available_tokens) > 0 and (place := self._pending.first(-room)) is not None:
                if place[2].promised_by is not None:
                    freed.append(place[2].promised_by)  # where it was first in turn, the next may fit
                self._decode(place, load)
        self._serve_fifo()

    def _settle(self, place: _Place) -> None:
        """Gives a pending decode its pages, or at least the promise of pages."""
        pending = place[2]
        load = self.colocated_pool.roomiest(pending.num_tokens)
        if load is None:
            return
        if load.available_tokens >= pending.num_tokens:
            self._decode(place, load)
            return
        pending.promised_by = load
        self.ledger.promise(pending.dispatch, load, pending.num_tokens)
        insort(self._promised.setdefault(load, []), place)
        self._keep_promises(load)  # an earlier request than those that wait for this worker may fit

    def _deliver_promised(self, load: WorkerLoad) -> None:
        """Before a worker gets a prefill whether it has room or not, it gets the decodes that it has promised pages.

        Under such policies its account may never again have them free; in its own queue decodes come first.
        Algorithm 2 overflows only where more is free than promised: there this finds nothing.
        """
        for place in tuple(self._promised.get(load, ())):
            self._decode(place, load)

    def _keep_promises(self, load: WorkerLoad) -> None:
        promised = self._promised.get(load)
        while promised and load.free_pages >= load.pages_for(promised[0][2].num_tokens):
            self._decode(promised[0], load)

    def _decode(self, place: _Place, load: WorkerLoad) -> None:
        pending = place[2]
        self._forget(place)
        self.ledger.reserve(pending.dispatch, load, pending.num_tokens)
        self._assign(pending.dispatch, Route(load, RouteKind.DECODE))

    def _forget(self, place: _Place) -> None:
        pending = place[2]
        del self._place_of[pending.dispatch]
        self._pending.remove(place)
        if pending.promised_by is not None:
            promised = self._promised[pending.promised_by]
            del promised[bisect_left(promised, place)]
            pending.promised_by = None
