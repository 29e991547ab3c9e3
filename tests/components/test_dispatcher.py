from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from backend.core.logprobs import TokenLogprobs
from backend.core.request import Request, RequestStatus
from backend.core.sampling_params import InvalidRequestError
from components.dispatcher import RequestFailedError, Trip
from components.protocol import BlockNews, unpack_tokens
from components.runtime import WorkerLostError
from tests.components.dispatching import (
    LENGTH,
    SIZE,
    candidates,
    complete,
    dispatcher,
    is_settled,
    outstanding,
    request,
    run,
    tokens,
    unheard,
    until,
)
from tests.components.fakes import (
    CARD,
    FakeBus,
    FakeContext,
    FakeWorkers,
    breaks,
    completes,
    hangs,
    report,
    says,
)


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
        asked = request(logprobs=0)
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
        bus.connected_since = math.inf
        await asyncio.sleep(0.05)
        router.watch()
        assert candidates(router) == [1]
        bus.connected_since = time.monotonic()
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


def test_a_worker_of_another_model_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        workers = FakeWorkers(w1=completes, w2=completes)
        router = unheard(workers)
        router.fleet.receive(report(1))
        router.fleet.receive(report(2, replace(CARD, fingerprint="other"), capacity_tokens=9999))
        assert candidates(router) == [1] and router.fleet.model == CARD and router.capacity_tokens == 4096

    run(test())
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["colocated_worker 2 gets no work"]


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
