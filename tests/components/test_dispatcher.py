from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from backend.core.logprobs import TokenLogprobs
from backend.core.request import Request, RequestStatus
from backend.core.routing import HybridPolicy, RouteKind
from backend.core.sampling_params import InvalidRequestError, SamplingParams
from components.dispatcher import Dispatcher, RequestFailedError, Trip
from components.protocol import BlockNews, unpack_tokens
from components.runtime import WorkerLostError
from tests.components.fakes import (
    CARD,
    COLOCATED,
    PREFILL,
    FakeBus,
    FakeContext,
    FakeKV,
    FakeWorkers,
    breaks,
    completes,
    hangs,
    report,
    says,
    token_at,
)

LENGTH = 32
SIZE = 3 + 2 * LENGTH


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def request(name: str = "r") -> Request:
    return Request(name, [5, 6, 7], SamplingParams(2 * LENGTH, 2 * LENGTH), 0.0)


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


def test_a_block_runs_to_its_end() -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=completes)
        router = dispatcher(workers)
        asked = request()
        assert await complete(router, asked) == [5, LENGTH]
        assert asked.block.committed_prefix() == tokens(asked)
        assert asked.status is RequestStatus.DENOISING
        assert is_settled(router, workers)

    run(test())


def test_the_next_block_carries_the_blocks_before() -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=completes)
        router = dispatcher(workers)
        asked = request()
        await complete(router, asked)
        first = asked.block.committed_prefix()
        asked.next_block()
        await complete(router, asked)
        assert unpack_tokens(workers.calls[1][1]["finished_blocks"]) == first
        assert asked.answer()[1] is RequestStatus.FINISHED_LENGTH

    run(test())


def test_outstanding_tokens_are_charged_until_the_prefill_has_run() -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=hangs(0), w2=hangs(1))
        router = dispatcher(workers)
        contexts = [FakeContext("a"), FakeContext("b")]
        tasks = [asyncio.create_task(complete(router, request(c.id()), c)) for c in contexts]
        await until(lambda: outstanding(router) == {1: SIZE, 2: 0})
        for context in contexts:
            context.stop_generating()
        await asyncio.gather(*tasks)
        assert is_settled(router, workers)

    run(test())


def test_a_lost_worker_costs_an_attempt_and_no_token() -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=breaks(after=7), w2=completes)
        router = dispatcher(workers)
        asked = request()
        await complete(router, asked)
        assert asked.block.committed_prefix() == tokens(asked)
        assert [worker_id for worker_id, _ in workers.calls] == [1, 2]
        again = workers.calls[1][1]
        assert again["attempt"] == 2 and unpack_tokens(again["known"]) == tokens(asked)[:7]
        assert workers.calls[0][1]["request_id"] != again["request_id"]
        assert router.num_retries == 1
        assert is_settled(router, workers)

    run(test())


def test_logprobs_of_both_attempts_stand_with_their_tokens() -> None:
    def told(count: int) -> tuple[TokenLogprobs, ...]:
        return tuple(TokenLogprobs(-float(i)) for i in range(count))

    async def test() -> None:
        async def is_lost(request: Request) -> AsyncGenerator[BlockNews]:
            yield BlockNews(tokens(request)[:5], logprobs=told(5))
            raise WorkerLostError("Disconnected")

        workers = FakeWorkers(w1=is_lost, w2=says(BlockNews(tokens(request()), True, logprobs=told(LENGTH))))
        asked = request()
        await complete(dispatcher(workers), asked)
        assert asked.logprobs(0, LENGTH) == told(LENGTH)
        assert asked.logprobs(3, 4) == told(7)[3:]

    run(test())


@pytest.mark.parametrize("after", [0, 1, LENGTH])
def test_what_was_streamed_stays_whatever_the_next_attempt_says(after: int) -> None:
    async def test() -> None:
        other = [7] * LENGTH
        workers = FakeWorkers(w1=breaks(after), w2=says(BlockNews(other, True)))
        asked = request()
        frontiers = await complete(dispatcher(workers), asked)
        assert asked.block.committed_prefix() == tokens(asked)[:after] + other[after:]
        assert frontiers[-1] == LENGTH

    run(test())


def test_attempts_are_bounded() -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=breaks(1), w2=breaks(2), w3=breaks(0), w4=completes)
        router = dispatcher(workers, max_attempts=3)
        with pytest.raises(RequestFailedError, match="gave up: its block was lost 3 times in a row"):
            await complete(router, request())
        assert len(workers.calls) == 3
        assert is_settled(router, workers)

    run(test())


def test_a_suspect_gets_no_work_until_it_is_heard() -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=breaks(0), w2=completes)
        router = dispatcher(workers)
        await complete(router, request("a"))
        assert candidates(router) == [2]
        await complete(router, request("b"))
        assert [worker_id for worker_id, _ in workers.calls] == [1, 2, 2]
        router.fleet.receive(report(1))
        assert candidates(router) == [1, 2]

    run(test())


def test_a_worker_that_only_breaks_does_not_attract_all_work() -> None:
    """It goes on reporting that it is free; the other one is busy, and yet gets the requests done."""

    async def test() -> None:
        workers = FakeWorkers(w1=breaks(0), w2=completes)
        router = dispatcher(workers, max_attempts=3)
        for i in range(30):
            for worker_id in (1, 2):
                router.fleet.receive(report(worker_id))
            await complete(router, request(f"r{i}"))
        assert [worker_id for worker_id, _ in workers.calls].count(1) < 5
        assert is_settled(router, workers)

    run(test())


@pytest.mark.parametrize(
    ("news", "error"),
    [
        (BlockNews((), True, error="it is too long", is_refusal=True), InvalidRequestError),
        (BlockNews((), True, error="logits are not finite"), RequestFailedError),
    ],
)
def test_a_workers_error_is_not_tried_elsewhere(news: BlockNews, error: type[Exception]) -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=says(BlockNews([9]), news), w2=completes)
        router = dispatcher(workers)
        with pytest.raises(error, match=news.error):
            await complete(router, request())
        assert len(workers.calls) == 1 and router.num_retries == 0
        assert candidates(router) == [1, 2]
        assert is_settled(router, workers)

    run(test())


def test_a_handler_that_failed_is_no_lost_worker() -> None:
    async def fails(request: Request) -> Any:
        raise RuntimeError("Unknown: KeyError")
        yield

    async def test() -> None:
        workers = FakeWorkers(w1=fails, w2=completes)
        router = dispatcher(workers)
        with pytest.raises(RuntimeError, match="KeyError"):
            await complete(router, request())
        assert is_settled(router, workers)

    run(test())


def test_a_stream_that_ends_too_early_is_a_lost_worker() -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=says(BlockNews([100 + 3])), w2=completes)
        router = dispatcher(workers)
        asked = request()
        await complete(router, asked)
        assert asked.block.committed_prefix() == tokens(asked)
        assert router.num_retries == 1

    run(test())


def test_stopped_while_it_runs() -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=hangs(4))
        router = dispatcher(workers)
        context = FakeContext("r")
        asked = request()
        task = asyncio.create_task(complete(router, asked, context))
        await until(lambda: asked.block.frontier == 4)
        context.stop_generating()
        assert await task == [4]
        assert all(child.is_stopped() for child in context.children) and len(context.children) == 1
        assert router.num_retries == 0
        assert is_settled(router, workers)

    run(test())


def test_a_consumer_that_leaves_stops_the_worker() -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=hangs(4))
        router = dispatcher(workers)
        context = FakeContext("r")
        progress = router.run_block(request(), context, Trip())
        await anext(progress)
        await progress.aclose()
        assert context.children[0].is_stopped()
        assert is_settled(router, workers)

    run(test())


def test_stopped_while_it_waits_for_a_worker() -> None:
    async def test() -> None:
        workers = FakeWorkers()
        router = dispatcher(workers)
        context = FakeContext("r")
        task = asyncio.create_task(complete(router, request(), context))
        await until(lambda: router.placer.num_queued == 1)
        context.stop_generating()
        assert await task == []
        assert is_settled(router, workers)

    run(test())


def test_stopped_in_the_moment_it_is_placed() -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=completes)
        workers.listed = []
        router = dispatcher(workers)
        contexts = [FakeContext("a"), FakeContext("b")]
        tasks = [asyncio.create_task(complete(router, request(c.id()), c)) for c in contexts]
        await until(lambda: router.placer.num_queued == 2)
        workers.listed = [1]
        router.fleet.receive(report(1))
        contexts[0].stop_generating()
        router.watch()
        assert await asyncio.gather(*tasks) == [[], [5, LENGTH]]
        assert is_settled(router, workers)

    run(test())


def test_cancelled_while_it_waits() -> None:
    async def test() -> None:
        workers = FakeWorkers()
        router = dispatcher(workers)
        task = asyncio.create_task(complete(router, request()))
        await until(lambda: router.placer.num_queued == 1)
        task.cancel()
        await asyncio.wait({task})
        assert is_settled(router, workers)

    run(test())


def test_no_worker_for_too_long() -> None:
    async def test() -> None:
        workers = FakeWorkers()
        router = dispatcher(workers, placement_timeout_s=0.05)
        waiting = asyncio.create_task(complete(router, request()))
        while not waiting.done():
            router.watch()
            await asyncio.sleep(0.01)
        with pytest.raises(RequestFailedError, match="no worker that can take it for 0.05 s"):
            waiting.result()
        assert is_settled(router, workers)

    run(test())


def test_who_waited_first_is_served_first() -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=completes)
        workers.listed = []
        router = dispatcher(workers)
        tasks = []
        for i in range(5):
            tasks.append(asyncio.create_task(complete(router, request(f"r{i}"))))
            await until(lambda i=i: router.placer.num_queued == i + 1)
        workers.listed = [1]
        router.fleet.receive(report(1))
        router.watch()
        await asyncio.gather(*tasks)
        assert [message["request_id"].partition("/")[0] for _, message in workers.calls] == [f"r{i}" for i in range(5)]

    run(test())


def test_work_goes_to_the_least_loaded() -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=hangs(0), w2=hangs(0), w3=hangs(0))
        router = dispatcher(workers)
        contexts = [FakeContext(f"r{i}") for i in range(6)]
        tasks = [asyncio.create_task(complete(router, request(c.id()), c)) for c in contexts]
        await until(lambda: len(workers.calls) == 6)
        assert sorted(worker_id for worker_id, _ in workers.calls) == [1, 1, 2, 2, 3, 3]
        for context in contexts:
            context.stop_generating()
        await asyncio.gather(*tasks)
        assert is_settled(router, workers)

    run(test())


def test_a_silent_worker_is_lost_and_its_blocks_go_elsewhere() -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=hangs(6), w2=completes)
        router = dispatcher(workers, worker_timeout_s=0.1)
        asked = request()
        task = asyncio.create_task(complete(router, asked))
        await until(lambda: asked.block.frontier == 6)
        while not task.done():
            router.fleet.receive(report(2))
            router.watch()
            await asyncio.sleep(0.01)
        assert asked.block.committed_prefix() == tokens(asked)
        assert candidates(router) == [2] and router.num_retries == 1
        assert is_settled(router, workers)
        router.fleet.receive(report(1))
        assert candidates(router) == [1, 2], "heard again, it is there again"

    run(test())


def test_nobody_is_lost_while_the_router_itself_is_cut_off() -> None:
    async def test() -> None:
        bus = FakeBus()
        workers = FakeWorkers(w1=completes)
        router = dispatcher(workers, bus, worker_timeout_s=0.02)
        bus.is_connected = False
        await asyncio.sleep(0.05)
        router.watch()
        assert candidates(router) == [1]
        bus.is_connected, bus.connected_since = True, time.monotonic()
        router.watch()
        assert candidates(router) == [1], "the silence counts from the new connection"
        await asyncio.sleep(0.05)
        router.watch()
        assert candidates(router) == []

    run(test())


def test_lost_and_no_longer_listed_is_forgotten() -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=completes)
        router = dispatcher(workers, worker_timeout_s=0.01)
        workers.listed = []
        router.watch()
        assert candidates(router) == []
        await asyncio.sleep(0.03)
        router.watch()
        assert router.fleet.model is None and router.capacity_tokens == 0

    run(test())


def test_an_unheard_or_unlisted_worker_gets_nothing() -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=completes)
        router = unheard(workers)
        assert candidates(router) == []
        router.fleet.receive(report(2))
        assert candidates(router) == []
        router.fleet.receive(report(1))
        assert candidates(router) == [1]

    run(test())


def test_a_worker_of_another_model_gets_nothing() -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=completes, w2=completes)
        router = unheard(workers)
        router.fleet.receive(report(1))
        router.fleet.receive(report(2, replace(CARD, fingerprint="other"), capacity_tokens=9999))
        assert candidates(router) == [1] and router.fleet.model == CARD and router.capacity_tokens == 4096

    run(test())


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_left_after_any_mix(seed: int) -> None:
    """300 requests over workers that work, break, hang and vanish, with clients that leave."""

    async def test() -> None:
        rng = random.Random(seed)

        async def moody(request: Request) -> Any:
            kind = rng.choice([completes, completes, completes, breaks(rng.randrange(LENGTH)), hangs(3)])
            async for news in kind(request):
                yield news
                await asyncio.sleep(rng.random() * 0.002)

        workers = FakeWorkers(w1=moody, w2=moody, w3=moody)
        router = dispatcher(workers, max_attempts=10**6, worker_timeout_s=60.0)

        async def client(i: int) -> None:
            context, asked = FakeContext(f"r{i}"), request(f"r{i}")
            if rng.random() < 0.2:
                asyncio.get_running_loop().call_later(rng.random() * 0.05, context.stop_generating)
            await complete(router, asked, context)
            if not context.is_stopped():
                assert asked.block.committed_prefix() == tokens(asked)

        async def trouble() -> None:
            while True:
                victim = rng.choice([1, 2, 3])
                next(
                    w for w in router.fleet if w.worker_id == victim
                ).lost.set()  # as `watch` does after a long silence
                await asyncio.sleep(0.002)
                for worker_id in (1, 2, 3):
                    router.fleet.receive(report(worker_id))
                router.watch()
                await asyncio.sleep(0.002)

        making = asyncio.create_task(trouble())
        await asyncio.gather(*(client(i) for i in range(300)))
        making.cancel()
        assert router.num_retries > 10
        assert is_settled(router, workers)

    run(test())


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


def test_a_block_is_prefilled_on_one_worker_and_denoised_on_another() -> None:
    async def test() -> None:
        kv = FakeKV()
        prefill, colocated = FakeWorkers(w1=kv.holds(1)), FakeWorkers(w2=kv.reads)
        router, asked, trip = hybrid(prefill, colocated), request(), Trip()
        assert await complete(router, asked, trip=trip) == [3, 8, LENGTH]
        assert asked.block.committed_prefix() == tokens(asked)
        assert asked.status is RequestStatus.DENOISING and trip.route is RouteKind.PREFILL
        assert (trip.seconds["prefill_queue"], trip.seconds["prefill"]) >= (0.5, 0.25)
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


def everyone(prefill: FakeWorkers, colocated: FakeWorkers) -> list[tuple[int, str]]:
    return [(w, PREFILL) for w in prefill.listed] + [(w, COLOCATED) for w in colocated.listed]
