"""A dispatcher over workers without processes, and what is asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from backend.core.request import Request
from backend.core.routing import HybridPolicy
from backend.core.sampling_params import SamplingParams
from components.dispatcher import Dispatcher, Trip
from tests.components.fakes import (
    COLOCATED,
    PREFILL,
    FakeBus,
    FakeContext,
    FakeWorkers,
    report,
    token_at,
)

LENGTH = 32
SIZE = 3 + 2 * LENGTH


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def request(name: str = "r", **options: Any) -> Request:
    return Request(name, [5, 6, 7], SamplingParams(2 * LENGTH, 2 * LENGTH, **options), 0.0)


def dispatcher(workers: FakeWorkers, bus: FakeBus | None = None, **options: Any) -> Dispatcher:
    """All listed workers have been heard."""
    made = unheard(workers, bus, **options)
    for worker_id in workers.listed:
        made.fleet.receive(report(worker_id))
    return made


def unheard(
    workers: FakeWorkers, bus: FakeBus | None = None, prefill: FakeWorkers | None = None, **options: Any
) -> Dispatcher:
    options = {"max_attempts": 3, "worker_timeout_s": 60.0, "placement_timeout_s": 5.0} | options
    policy = options.pop("policy", None) or HybridPolicy(8192)
    calls: Any = {COLOCATED: workers, PREFILL: prefill or FakeWorkers()}
    return Dispatcher(policy, calls, workers, bus or FakeBus(), **options)  # type: ignore[arg-type]


def candidates(dispatcher: Dispatcher) -> list[int]:
    return sorted(load.worker_id for load in dispatcher.placer.colocated_pool)


def outstanding(dispatcher: Dispatcher) -> dict[int, int]:
    return {worker.worker_id: worker.load.outstanding_prefill_tokens for worker in dispatcher.fleet}


async def complete(
    dispatcher: Dispatcher, request: Request, context: FakeContext | None = None, trip: Trip | None = None
) -> list[int]:
    """Runs the current block; the frontier after each piece of news."""
    frontiers = []
    async for _ in dispatcher.run_block(request, context or FakeContext(request.request_id), trip or Trip()):
        frontiers.append(request.block.frontier)
    return frontiers


def tokens(request: Request) -> list[int]:
    return [token_at(request, offset) for offset in range(LENGTH)]


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def is_settled(dispatcher: Dispatcher, *workers: FakeWorkers) -> bool:
    """Nothing is charged to anyone, nobody waits, no call is open."""
    placer = dispatcher.placer
    accounts = [
        (load.outstanding_prefill_tokens, load.num_prefills, load.num_requests, load.used_pages, load.promised_pages)
        for load in (worker.load for worker in dispatcher.fleet)
    ]
    waiting = placer.num_queued, placer.num_pending_decodes, len(placer.ledger)
    return not any(map(any, accounts)) and not any(waiting) and not any(one.num_open for one in workers)


def hybrid(
    prefill: FakeWorkers, colocated: FakeWorkers, *, capacities: dict[int, int] | None = None, **options: Any
) -> Dispatcher:
    """All listed workers of both pools have been heard."""
    made = unheard(colocated, prefill=prefill, **options)
    for component, workers in ((PREFILL, prefill), (COLOCATED, colocated)):
        for worker_id in workers.listed:
            capacity = (capacities or {}).get(worker_id, 4096)
            made.fleet.receive(report(worker_id, component=component, capacity_tokens=capacity))
    return made


def everyone(prefill: FakeWorkers, colocated: FakeWorkers) -> list[tuple[int, str]]:
    return [(w, PREFILL) for w in prefill.listed] + [(w, COLOCATED) for w in colocated.listed]
