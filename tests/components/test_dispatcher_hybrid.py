from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import Any

import pytest

from backend.core.request import Request, RequestStatus
from backend.core.routing import HybridPolicy, RouteKind
from components.dispatcher import Trip
from components.protocol import BlockNews
from components.runtime import WorkerLostError
from tests.components.dispatching import (
    LENGTH,
    SIZE,
    candidates,
    complete,
    dispatcher,
    everyone,
    hybrid,
    is_settled,
    request,
    run,
    tokens,
    unheard,
    until,
)
from tests.components.fakes import (
    CARD,
    PREFILL,
    FakeContext,
    FakeKV,
    FakeWorkers,
    breaks,
    completes,
    hangs,
    report,
)


def test_a_block_is_prefilled_on_one_worker_and_denoised_on_another() -> None:
    async def test() -> None:
        kv = FakeKV()
        prefill, colocated = FakeWorkers(w1=kv.holds(1)), FakeWorkers(w2=kv.reads)
        router, asked, trip = hybrid(prefill, colocated), request(), Trip()
        assert await complete(router, asked, trip=trip) == [3, 8, LENGTH]
        assert asked.block.committed_prefix() == tokens(asked)
        assert asked.status is RequestStatus.DENOISING and trip.route is RouteKind.PREFILL
        assert (trip.seconds["prefill_queue"], trip.seconds["prefill"]) >= (0.5, 0.25)
        assert trip.num_steps == [9], "of who denoised it, once"
        sent = colocated.calls[0][1]
        assert sent["held"]["key"] == prefill.calls[0][1]["request_id"] == sent["request_id"]
        assert router.num_prefills == {("arrival", "prefill"): 1} and router.num_retries == 0
        assert is_settled(router, prefill, colocated) and kv.num_held == 0

    run(test())


def test_a_prefill_that_finishes_the_block_transfers_nothing() -> None:
    async def test() -> None:
        prefill, colocated = FakeWorkers(w1=completes), FakeWorkers(w2=completes)
        router, asked = hybrid(prefill, colocated), request()
        await complete(router, asked)
        assert asked.block.committed_prefix() == tokens(asked) and not colocated.calls
        assert is_settled(router, prefill, colocated)

    run(test())


def test_prefills_overflow_at_the_threshold() -> None:
    async def test() -> None:
        prefill, colocated = FakeWorkers(w1=hangs(0)), FakeWorkers(w2=hangs(1))
        router = hybrid(prefill, colocated, policy=HybridPolicy(2 * SIZE))
        contexts = [FakeContext(f"r{i}") for i in range(4)]
        tasks = []
        for context in contexts:
            tasks.append(asyncio.create_task(complete(router, request(context.id()), context)))
            await until(lambda: len(prefill.calls) + len(colocated.calls) == len(tasks))
        assert len(prefill.calls) == 2 and len(colocated.calls) == 2, "o_w was at theta for the last two"
        assert router.placer.num_overflows == 2
        for context in contexts:
            context.stop_generating()
        await asyncio.gather(*tasks)
        assert is_settled(router, prefill, colocated)

    run(test())


def test_with_an_infinite_threshold_nothing_overflows_and_all_is_served_in_turn() -> None:
    async def test() -> None:
        kv = FakeKV()
        prefill, colocated = FakeWorkers(w1=kv.holds(1)), FakeWorkers(w2=kv.reads)
        router = hybrid(prefill, colocated, policy=HybridPolicy(float("inf")), capacities={1: 160, 2: 160})
        asked = [request(f"r{i}") for i in range(20)]
        await asyncio.gather(*(complete(router, one) for one in asked))
        assert all(one.block.committed_prefix() == tokens(one) for one in asked)
        assert len(prefill.calls) == len(colocated.calls) == 20 and router.placer.num_overflows == 0
        assert is_settled(router, prefill, colocated)

    run(test())


def test_a_pending_decode_waits_for_memory() -> None:
    async def test() -> None:
        kv = FakeKV()
        prefill, colocated = FakeWorkers(w1=kv.holds(1)), FakeWorkers(w2=hangs(0))
        router = hybrid(prefill, colocated, capacities={2: 80})
        context = FakeContext("first")
        first = asyncio.create_task(complete(router, request("first"), context))
        await until(lambda: len(colocated.calls) == 1)
        colocated.behaviours[2] = kv.reads
        second = asyncio.create_task(complete(router, request("second")))
        await until(lambda: router.placer.num_pending_decodes == 1)
        context.stop_generating()
        await asyncio.gather(first, second)
        assert is_settled(router, prefill, colocated) and kv.num_held == 0

    run(test())


def test_a_prefill_worker_lost_before_its_kv_was_read() -> None:
    """While the block waits for memory; it is prefilled anew elsewhere, and what was streamed stands."""

    async def test() -> None:
        kv = FakeKV()

        async def dies(request: Request) -> Any:
            async for news in kv.holds(3, num_tokens=5)(request):
                yield news
                await asyncio.sleep(0.01)
                raise WorkerLostError("Disconnected")

        prefill, colocated = FakeWorkers(w1=kv.holds(1), w3=dies), FakeWorkers(w2=hangs(0))
        router = hybrid(prefill, colocated, capacities={2: 80})
        blocker = FakeContext("blocker")
        blocking = asyncio.create_task(complete(router, request("blocker"), blocker))
        await until(lambda: len(colocated.calls) == 1)
        asked = request()
        task = asyncio.create_task(complete(router, asked))
        await until(lambda: router.num_retries == 1 and router.placer.num_pending_decodes == 1)
        assert asked.block.known == tuple(tokens(asked)[:5])
        colocated.behaviours[2] = kv.reads
        blocker.stop_generating()
        await asyncio.gather(task, blocking)
        assert asked.block.committed_prefix() == tokens(asked)
        assert [call[0] for call in prefill.calls] == [1, 3, 1]
        assert is_settled(router, prefill, colocated) and kv.num_held == 0

    run(test())


def test_a_prefill_worker_lost_while_its_kv_is_read() -> None:
    async def test() -> None:
        kv = FakeKV()
        started = asyncio.Event()

        async def dies(request: Request) -> Any:
            async for news in kv.holds(1)(request):
                yield news
                await started.wait()
                raise WorkerLostError("Disconnected")

        async def never_gets_it(request: Request) -> Any:
            started.set()
            await asyncio.Event().wait()
            yield

        prefill, colocated = FakeWorkers(w1=dies), FakeWorkers(w2=never_gets_it, w4=kv.reads)
        router = hybrid(prefill, colocated, capacities={4: 80})
        asked = request()
        task = asyncio.create_task(complete(router, asked))
        await started.wait()
        colocated.behaviours[2] = kv.reads
        await task
        assert asked.block.committed_prefix() == tokens(asked) and router.num_retries == 1
        assert candidates(router) == [2, 4], "it was not the reader's fault"
        assert [call[0] for call in prefill.calls] == [1]
        assert is_settled(router, prefill, colocated)

    run(test())


def test_a_prefill_worker_lost_after_its_kv_was_read_is_no_matter() -> None:
    async def test() -> None:
        kv = FakeKV()
        is_read = asyncio.Event()

        async def dies_late(request: Request) -> Any:
            async for news in kv.holds(1)(request):
                yield news
                await is_read.wait()
                raise WorkerLostError("Disconnected")

        async def slow(request: Request) -> Any:
            async for news in kv.reads(request):
                yield news
                is_read.set()
                await asyncio.sleep(0.01)

        prefill, colocated = FakeWorkers(w1=dies_late), FakeWorkers(w2=slow)
        router, asked = hybrid(prefill, colocated), request()
        await complete(router, asked)
        assert asked.block.committed_prefix() == tokens(asked) and router.num_retries == 0
        assert is_settled(router, prefill, colocated)

    run(test())


def test_a_colocated_worker_lost_with_the_kv() -> None:
    async def test() -> None:
        kv = FakeKV()
        prefill, colocated = FakeWorkers(w1=kv.holds(1)), FakeWorkers(w2=breaks(0), w4=kv.reads)
        router, asked = hybrid(prefill, colocated, capacities={4: 2048}), request()
        await complete(router, asked)
        assert asked.block.committed_prefix() == tokens(asked) and router.num_retries == 1
        assert len(prefill.calls) == 2, "prefilled again: the KV is freed with the attempt"
        assert is_settled(router, prefill, colocated) and kv.num_held == 0

    run(test())


def test_after_a_failed_transfer_the_block_is_denoised_where_it_is_prefilled() -> None:
    async def test() -> None:
        kv = FakeKV()
        prefill, colocated = FakeWorkers(w1=kv.holds(1)), FakeWorkers(w2=kv.cannot_read)
        router, asked = hybrid(prefill, colocated), request()
        await complete(router, asked)
        assert asked.block.committed_prefix() == tokens(asked) and router.num_retries == 1
        assert len(prefill.calls) == 1 and len(colocated.calls) == 2
        assert router.num_prefills == {("arrival", "prefill"): 1, ("retry", "colocated"): 1}
        asked.next_block()
        await complete(router, asked)
        assert len(prefill.calls) == 2, "the next block is routed like any other"
        assert is_settled(router, prefill, colocated) and kv.num_held == 0

    run(test())


def test_kv_given_up_by_its_prefill_worker() -> None:
    """Its lease ends before anybody has read it: the block is prefilled again."""

    async def test() -> None:
        kv = FakeKV()

        async def gives_up(request: Request) -> Any:
            async for news in kv.holds(1)(request):
                yield news
                prefill.behaviours[1], colocated.behaviours[2] = kv.holds(1), kv.reads
                yield BlockNews((), True, error="nobody read the KV for 1 s", is_retryable=True)

        prefill, colocated = FakeWorkers(w1=gives_up), FakeWorkers(w2=hangs(0))
        router, asked = hybrid(prefill, colocated), request()
        await complete(router, asked)
        assert asked.block.committed_prefix() == tokens(asked) and router.num_retries == 1
        assert is_settled(router, prefill, colocated) and kv.num_held == 0

    run(test())


def test_kv_that_is_read_while_its_prefill_runs() -> None:
    async def test() -> None:
        kv = FakeKV()
        prefill, colocated = FakeWorkers(w1=kv.holds_early(1)), FakeWorkers(w2=kv.reads_early)
        colocated.kv = kv
        router, asked, trip = hybrid(prefill, colocated), request(), Trip()
        assert await complete(router, asked, trip=trip) == [3, 8, LENGTH]
        assert asked.block.committed_prefix() == tokens(asked) and router.num_retries == 0
        assert [message["key"] for message in colocated.asked] == [prefill.calls[0][1]["request_id"]]
        assert colocated.calls[0][1]["held"]["is_running"], "it was called before the prefill had run"
        assert (trip.seconds["prefill_queue"], trip.seconds["prefill"]) >= (0.5, 0.25)
        assert is_settled(router, prefill, colocated) and kv.num_held == 0

    run(test())


def test_a_prefill_that_finishes_the_block_while_its_kv_is_read() -> None:
    async def test() -> None:
        kv = FakeKV()
        prefill, colocated = FakeWorkers(w1=kv.holds_early(1, LENGTH)), FakeWorkers(w2=kv.reads_early)
        router, asked = hybrid(prefill, colocated), request()
        assert await complete(router, asked) == [LENGTH]
        assert asked.block.committed_prefix() == tokens(asked)
        assert len(colocated.calls) == 1 and not colocated.asked
        assert is_settled(router, prefill, colocated) and kv.num_held == 0

    run(test())


def test_an_answer_may_be_complete_while_its_kv_is_read() -> None:
    """By what the prefill commits; whoever drives the block then ends the request."""

    async def test() -> None:
        kv = FakeKV()
        prefill, colocated = FakeWorkers(w1=kv.holds_early(1)), FakeWorkers(w2=kv.reads_early)
        colocated.kv = kv
        router, asked = hybrid(prefill, colocated), request()
        async with aclosing(router.run_block(asked, FakeContext("r"), Trip())) as progress:
            async for _ in progress:
                asked.transition(RequestStatus.FINISHED_LENGTH)
                break
        await until(lambda: is_settled(router, prefill, colocated))

    run(test())


def test_without_room_a_running_prefill_is_read_when_it_has_run() -> None:
    async def test() -> None:
        kv = FakeKV()
        prefill, colocated = FakeWorkers(w1=kv.holds(1), w3=kv.holds_early(3)), FakeWorkers(w2=hangs(0))
        router = hybrid(prefill, colocated, capacities={2: 80})
        blocker = FakeContext("blocker")
        blocking = asyncio.create_task(complete(router, request("blocker"), blocker))
        await until(lambda: len(colocated.calls) == 1)
        colocated.behaviours[2] = kv.reads
        asked = request()
        task = asyncio.create_task(complete(router, asked))
        await until(lambda: router.placer.num_pending_decodes == 1)
        blocker.stop_generating()
        await asyncio.gather(task, blocking)
        assert asked.block.committed_prefix() == tokens(asked)
        assert not colocated.calls[1][1]["held"]["is_running"] and not colocated.asked
        assert is_settled(router, prefill, colocated) and kv.num_held == 0

    run(test())


@pytest.mark.parametrize("stage", ["prefill", "pending", "transfer", "denoising"])
def test_a_client_that_leaves_frees_both_sides(stage: str) -> None:
    async def test() -> None:
        kv = FakeKV()
        prefill = FakeWorkers(w1=hangs(0) if stage == "prefill" else kv.holds(1))
        colocated = FakeWorkers(w2=hangs(0) if stage == "transfer" else hangs(2))
        router = hybrid(prefill, colocated, capacities={2: 80} if stage == "pending" else None)
        blocker, context = FakeContext("blocker"), FakeContext("r")
        tasks = []
        if stage == "pending":
            tasks.append(asyncio.create_task(complete(router, request("blocker"), blocker)))
            await until(lambda: len(colocated.calls) == 1)
        asked = request()
        tasks.append(asyncio.create_task(complete(router, asked, context)))
        await until(
            lambda: {
                "prefill": len(prefill.calls) == 1,
                "pending": router.placer.num_pending_decodes == 1,
                "transfer": len(colocated.calls) == 1,
                "denoising": asked.block.frontier == 5,
            }[stage]
        )
        context.stop_generating()
        await tasks[-1]
        assert kv.num_held == (1 if stage == "pending" else 0)
        blocker.stop_generating()
        await asyncio.gather(*tasks)
        assert router.num_retries == 0
        assert is_settled(router, prefill, colocated) and kv.num_held == 0

    run(test())


def test_a_draining_worker_gets_no_more_and_finishes_what_it_has() -> None:
    async def test() -> None:
        kv = FakeKV()
        prefill, colocated = FakeWorkers(w1=kv.holds(1), w3=kv.holds(3)), FakeWorkers(w2=kv.reads)
        router = hybrid(prefill, colocated)
        router.fleet.receive(report(1, component=PREFILL, is_draining=True))
        asked = [request(f"r{i}") for i in range(5)]
        await asyncio.gather(*(complete(router, one) for one in asked))
        assert {call[0] for call in prefill.calls} == {3}
        router.fleet.receive(report(3, component=PREFILL, is_draining=True))
        await complete(router, request("last"))
        assert len(prefill.calls) == 5, "without a prefill worker it is colocated serving"
        assert is_settled(router, prefill, colocated)

    run(test())


def test_the_last_colocated_workers_finish_what_has_begun_while_they_drain() -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=completes, w2=completes)
        router = dispatcher(workers)
        router.watch()
        assert router.fleet.accepts_requests
        asked = request()
        await complete(router, asked)
        asked.next_block()
        router.fleet.receive(report(1, is_draining=True))
        router.watch()
        assert candidates(router) == [2] and router.fleet.accepts_requests
        router.fleet.receive(report(2, is_draining=True))
        router.watch()
        assert not router.fleet.accepts_requests, "new requests are for others"
        await complete(router, asked)
        assert asked.answer()[1] is RequestStatus.FINISHED_LENGTH
        router.fleet.receive(report(1))
        router.watch()
        assert candidates(router) == [1] and router.fleet.accepts_requests

    run(test())


def test_workers_with_other_pages_cannot_exchange_kv() -> None:
    async def test() -> None:
        router = unheard(FakeWorkers(w1=completes), prefill=FakeWorkers(w2=completes))
        router.fleet.receive(report(1))
        router.fleet.receive(report(2, component=PREFILL, page_size=32))
        assert len(router.placer.prefill_pool) == 0 and candidates(router) == [1]

    run(test())


@pytest.mark.parametrize("threshold", [2 * SIZE, float("inf")])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_left_after_any_mix_of_both_pools(seed: int, threshold: float) -> None:
    """300 requests; workers of both pools work, break, hang and vanish at any stage; clients leave."""

    async def test() -> None:
        rng = random.Random(seed)
        kv = FakeKV()

        def moody(usual: Any) -> Any:
            async def behaviour(request: Request) -> Any:
                kind = rng.choice([usual, usual, usual, breaks(0), hangs(0)])
                broken_after = rng.choice([1, 2, 99, 99])
                async for news in kind(request):
                    yield news
                    await asyncio.sleep(rng.random() * 0.002)
                    broken_after -= 1
                    if not broken_after:
                        raise WorkerLostError("Disconnected")

            return behaviour

        prefill = FakeWorkers(w1=moody(kv.holds(1)), w2=moody(kv.holds_early(2, 0)), w3=moody(completes))
        colocated = FakeWorkers(w11=moody(kv.reads_any), w12=moody(kv.reads_any), w13=moody(kv.cannot_read))
        colocated.kv = kv
        router = hybrid(prefill, colocated, policy=HybridPolicy(threshold), max_attempts=10**6)
        for worker_id, component in everyone(prefill, colocated):
            router.fleet.receive(report(worker_id, component=component, capacity_tokens=640))

        async def client(i: int) -> None:
            context, asked = FakeContext(f"r{i}"), request(f"r{i}")
            await asyncio.sleep(rng.random() * 0.2)
            if rng.random() < 0.2:
                asyncio.get_running_loop().call_later(rng.random() * 0.05, context.stop_generating)
            await complete(router, asked, context)
            if not context.is_stopped():
                assert asked.block.committed_prefix() == tokens(asked)

        async def trouble() -> None:
            while True:
                victim = rng.choice(list(router.fleet))
                victim.lost.set()  # as `watch` does after a long silence
                await asyncio.sleep(0.002)
                router.watch()
                await asyncio.sleep(0.002)
                for worker_id, component in everyone(prefill, colocated):
                    is_draining = rng.random() < 0.1
                    router.fleet.receive(report(worker_id, CARD, 640, component, is_draining))

        making = asyncio.create_task(trouble())
        await asyncio.gather(*(client(i) for i in range(300)))
        making.cancel()
        assert router.num_retries > 10
        assert is_settled(router, prefill, colocated) and kv.num_held == 0

    run(test())
