"""What the router counts, and that it can be asked at any moment."""

from __future__ import annotations

import asyncio

from prometheus_client import generate_latest

from backend.core.request import RequestStatus
from backend.core.routing import HybridPolicy
from components.router_metrics import Account, RouterMetrics
from tests.components.dispatching import complete, dispatcher, request, run
from tests.components.fakes import FakeWorkers, completes, report


def test_every_block_counts_the_last_one_of_an_answer_too() -> None:
    async def test() -> None:
        made = dispatcher(FakeWorkers(w1=completes))
        metrics = RouterMetrics(made, HybridPolicy(8192))
        asked, account = request(), Account("length")
        await complete(made, asked, trip=account.trip)
        asked.next_block()
        await complete(made, asked, trip=account.trip)
        asked.transition(RequestStatus.FINISHED_LENGTH)
        metrics.request_done(account, 1.0)
        assert "sangam_router_blocks_total 2.0" in generate_latest(metrics.registry).decode()

    run(test())


def test_workers_may_come_while_metrics_are_read() -> None:
    """Dynamo reads them in another thread than the event loop's."""

    async def test() -> None:
        made = dispatcher(FakeWorkers(w1=completes, w2=completes))
        seen = []
        for worker in made.fleet:
            made.fleet.receive(report(10 + worker.worker_id))
            seen.append(worker.worker_id)
        assert seen == [1, 2] and len(list(made.fleet)) == 4

    asyncio.run(test())
