"""A router and its workers: the real Placer, called as the live dispatcher calls it, in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backend.core.ledger import Dispatch
from backend.core.placer import Placer
from backend.core.request import Request
from backend.core.routing import Prefill, Route, RouteKind
from backend.core.step import StepPlan
from benchmarks.simulator.clock import Clock
from benchmarks.simulator.config import SimulatorConfig
from benchmarks.simulator.flight import DECODE, DECODE_QUEUE, PREFILL, PREFILL_QUEUE, TRANSFER, Flight, Trip
from benchmarks.simulator.timing import Message, Timing
from benchmarks.simulator.worker import SimWorker

_MESSAGES: dict[RouteKind, Message] = {
    RouteKind.PREFILL: "prefill",
    RouteKind.COLOCATED: "colocated",
    RouteKind.DECODE: "decode",
}


class Graph:
    """Runs requests from their arrival to their end.

    Args:
        horizon_s: until when workers count as busy; see `SimWorker`.
        on_finished: called with every request that has its answer.

    Attributes:
        workers: prefill workers first.
        commit_gaps_s: between one arrival of committed tokens at a client and the next, of all requests.
    """

    def __init__(
        self,
        config: SimulatorConfig,
        clock: Clock,
        timing: Timing,
        horizon_s: float,
        on_finished: Callable[[Trip], None],
    ) -> None:
        self._clock, self._timing, self._on_finished = clock, timing, on_finished
        self._hop_s = config.hop_s
        self.placer = self._placer(config)
        self._flights: dict[str, Flight] = {}
        self._flight_of: dict[Dispatch, Flight] = {}
        self.commit_gaps_s: list[float] = []
        self.workers = [
            SimWorker(number, number < config.num_prefill, config, clock, timing, self._flights, self, horizon_s)
            for number in range(config.num_prefill + config.num_colocated)
        ]
        for worker in self.workers:
            pool = self.placer.prefill_pool if worker.is_prefill else self.placer.colocated_pool
            self.placer.show(worker.load, pool)

    def arrive(self, trip: Trip) -> None:
        """Raises ValueError if no worker can ever hold the request."""
        size = len(trip.prompt) + trip.params.canvas_length
        if size > self.placer.colocated_pool.capacity_tokens:
            raise ValueError(f"prompt + canvas = {size} tokens do not fit any worker's KV cache")
        trip.due_s = self._clock.now
        self._submit(trip)

    def check(self) -> None:
        """Raises RuntimeError if something is left behind when nothing is due any more: a bug."""
        pools = [worker.scheduler.pool for worker in self.workers]
        for pool in pools:
            pool.check()
        num_held = sum(pool.num_pages - pool.num_free for pool in pools)
        if self._flights or num_held or len(self.placer.ledger):
            raise RuntimeError(f"{len(self._flights)} blocks never ended, {num_held} pages were never freed")

    # What variants of the router change.

    def _placer(self, config: SimulatorConfig) -> Placer:
        return Placer(config.policy(), self._assigned)

    def _prefill(self, flight: Flight) -> Prefill:
        trip = flight.trip
        return Prefill(flight.num_tokens, len(trip.prompt), trip.due_s, trip.route)

    # The router, as `Dispatcher._attempt` goes.

    def _submit(self, trip: Trip) -> None:
        block = len(trip.tokens) // trip.params.block_length
        name = f"{trip.name}/{block}.1"
        request = Request(name, trip.prompt, trip.params, trip.due_s, finished_blocks=trip.tokens)
        num_tokens = request.sequence_length
        dispatch = (trip.name, block, 1)
        flight = Flight(trip, dispatch, request, num_tokens, trip.blocks[block], self._clock.now)
        self._flights[name] = self._flight_of[dispatch] = flight
        self.placer.submit(dispatch, self._prefill(flight))

    def _assigned(self, dispatch: Dispatch, route: Route) -> None:
        flight = self._flight_of[dispatch]
        worker = flight.worker = self.workers[route.load.worker_id]
        trip, waited_s = flight.trip, self._clock.now - flight.waiting_since
        if route.kind is RouteKind.DECODE:
            trip.seconds[DECODE_QUEUE] += waited_s
        else:
            trip.seconds[PREFILL_QUEUE] += waited_s
            trip.route = trip.route or route.kind
            if route.kind is RouteKind.PREFILL:
                flight.source = worker
        self._clock.after(self._timing.message_s(_MESSAGES[route.kind], flight), worker.add, flight)

    def _prefilled(self, flight: Flight, is_done: bool) -> None:
        self.placer.prefilled(flight.dispatch)
        if flight.source is not None and not is_done:
            self._hand_over(flight)

    def _hand_over(self, flight: Flight) -> None:
        trip = flight.trip
        flight.request = Request(
            flight.request.request_id,
            trip.prompt,
            trip.params,
            trip.due_s,
            finished_blocks=trip.tokens,
            prefilled=flight.steps[0],
        )
        flight.waiting_since = self._clock.now
        self.placer.hand_over(flight.dispatch)

    def _source_freed(self, flight: Flight) -> None:
        self.placer.source_freed(flight.dispatch)

    def _done(self, flight: Flight) -> None:
        self.placer.done(flight.dispatch)
        del self._flights[flight.request.request_id], self._flight_of[flight.dispatch]
        trip, request = flight.trip, flight.request
        trip.num_steps += request.block.step
        if request.status.is_finished:
            trip.finished_s, trip.num_tokens = self._clock.now, len(request.answer()[0])
            self._on_finished(trip)
        else:
            trip.tokens += request.block.committed_prefix()
            self._submit(trip)

    # What workers say, as `AsyncEngine._publish` does: of a block's prefill, its commits and its end.

    def stepped(self, plan: StepPlan, left: Sequence[Request]) -> None:
        now, flights = self._clock.now, self._flights
        gone = {request.request_id for request in left}
        for request in plan.prefills:
            name = request.request_id
            flight, is_done = flights[name], name in gone
            if request.block.step > 1:  # a refresh in the middle of its block
                self._denoised(flight, request, is_done, now)
                continue
            self._frontier(flight, request, now)
            if is_done or flight.source is not None:
                _add_seconds(flight, now)
            self._clock.after(self._timing.message_s("prefilled", flight), self._prefilled, flight, is_done)
            if is_done:
                self._say_done(flight)
        for request in plan.decodes:
            name = request.request_id
            self._denoised(flights[name], request, name in gone, now)

    def freed(self, flight: Flight) -> None:
        self._clock.after(self._timing.message_s("freed", flight), self._source_freed, flight)

    def _denoised(self, flight: Flight, request: Request, is_done: bool, now: float) -> None:
        self._frontier(flight, request, now)
        if is_done:
            _add_seconds(flight, now)
            self._say_done(flight)

    def _say_done(self, flight: Flight) -> None:
        self._clock.after(self._timing.message_s("done", flight), self._done, flight)

    def _frontier(self, flight: Flight, request: Request, now: float) -> None:
        """Sends the client what it can have since this step."""
        frontier = request.block.frontier
        if frontier > flight.frontier:
            flight.frontier, trip, now = frontier, flight.trip, now + self._hop_s
            if trip.first_token_s is None:
                trip.first_token_s = now
            else:
                self.commit_gaps_s.append(now - trip.committed_s)
            trip.committed_s = now


def _add_seconds(flight: Flight, now: float) -> None:
    """As `BlockStream.seconds`."""
    seconds = flight.trip.seconds
    is_reader = flight.source is not None and flight.worker is not flight.source
    queued, ready = (DECODE_QUEUE, TRANSFER) if is_reader else (PREFILL_QUEUE, PREFILL)
    seconds[queued] += flight.started_s - flight.added_s
    seconds[ready] += flight.ready_s - flight.started_s
    seconds[DECODE] += now - flight.ready_s
