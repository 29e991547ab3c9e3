"""Blocks prefilled by one engine and denoised by another, KV moved in between: same tokens, nothing left over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from backend.core.page_pool import PagePool
from backend.core.prefill_scheduler import PrefillScheduler, PrefillSchedulerConfig
from backend.core.queries import is_steady
from backend.core.request import Request, RequestStatus
from backend.engine.async_engine import AsyncEngine
from backend.engine.block_stream import BlockStream, BlockUpdate, HeldBlock
from backend.engine.engine import Engine
from backend.models.config import ModelConfig
from backend.transfer.base import KVTransfer, TransferError, TransferStats
from backend.transfer.local import LocalNetwork, LocalTransfer
from tests.backend.engine.test_engine import LLADA, Logprobs, logprobs_alone, mixed_requests, note, run, small_engine


def prefill_engine(pages: int = 600, config: ModelConfig = LLADA, is_async: bool = False) -> Engine:
    engine = small_engine(pages=pages, config=config, is_async=is_async)
    engine.scheduler = PrefillScheduler(PrefillSchedulerConfig(300), PagePool(pages, 8))
    return engine


@dataclass
class Side:
    engine: Engine
    worker: AsyncEngine
    transfer: KVTransfer


@asynccontextmanager
async def pair(
    prefill_pages: int = 600,
    pages: int = 600,
    overlap: bool = False,
    config: ModelConfig = LLADA,
    is_async: bool = False,
) -> AsyncIterator[tuple[Side, Side]]:
    """A prefill worker and a colocated worker, without the processes around them."""
    network = LocalNetwork()
    sides: list[Side] = []
    colocated = small_engine(pages=pages, config=config, is_async=is_async)
    engines = prefill_engine(prefill_pages, config, is_async), colocated
    for engine, name in zip(engines, "pc", strict=True):
        worker: list[AsyncEngine] = []
        transfer = LocalTransfer(engine.runner.cache, name, "m", lambda key, w=worker: w[0].pulled(key), network)  # type: ignore[misc]
        worker.append(AsyncEngine(engine, transfer, overlap and name == "p"))
        sides.append(Side(engine, worker[0], transfer))
        worker[0].start()
    yield sides[0], sides[1]
    for side in sides:
        await side.worker.stop()
        side.transfer.close()
        side.engine.scheduler.pool.check()


def fork(request: Request, held: HeldBlock | None = None) -> Request:
    """The request as a worker gets it: by its tokens alone."""
    copy = Request(
        f"{request.request_id}/{request.block.index}.{request.block.attempt}",
        request.prompt,
        request.params,
        request.arrival_time,
        finished_blocks=request.response,
        known=request.block.known,
        attempt=request.block.attempt,
        prefilled=held.commits if held and not held.is_running else None,
        prefilled_logprobs=held.logprobs if held else (),
    )
    if held and held.is_running:
        copy.status = RequestStatus.WAITING_FOR_KV
    return copy


async def serve_block(prefill: Side, colocated: Side, request: Request) -> None:
    """What the router does for one block."""
    stream = prefill.worker.submit(fork(request))
    news = aiter(stream)
    first = await anext(news)
    take(request, first)
    if first.is_done:
        return
    held = first.held
    assert held is not None

    def pull(pages: Sequence[int]) -> Future[TransferStats]:
        assert held is not None
        return colocated.transfer.pull(
            prefill.transfer.source(), held.pages, pages,
            stamp=held.stamp, key=stream.request.request_id, timeout_s=10.0, by_layer=held.is_running,
        )  # fmt: skip

    copy = fork(request, held)
    denoising = colocated.worker.submit(copy, pull)
    try:
        await follow(news, denoising, colocated, request, held)
    finally:
        denoising.abort()  # as a worker does whose caller is gone
    last = await anext(news, None)
    assert last is None or (last.is_done, last.error) == (True, None), "the pages are free"


async def follow(
    news: AsyncIterator[BlockUpdate], denoising: BlockStream, colocated: Side, request: Request, held: HeldBlock
) -> None:
    if held.is_running:
        then = await anext(news)
        take(request, then)
        if then.is_done:
            return
        assert then.held is not None and not then.held.is_running
        colocated.worker.prefilled(denoising.request.request_id, then.held.commits, then.held.logprobs)
    async for update in denoising:
        take(request, update)


def take(request: Request, update: BlockUpdate) -> None:
    assert update.error is None, update.error
    request.block.logprobs.update(enumerate(update.logprobs, request.block.frontier))
    for token in update.tokens:
        request.block.commit(request.block.frontier, token)


async def serve(prefill: Side, colocated: Side, request: Request, told: Logprobs | None = None) -> list[int]:
    while True:
        await serve_block(prefill, colocated, request)
        if told is not None:
            note(request, told)
        tokens, end = request.answer()
        if end is not None:
            return tokens
        request.response += request.block.committed_prefix()
        request.block = type(request.block)(request.block.index + 1, request.block.length)


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    engine = small_engine()
    return {k: v for request in mixed_requests(100) for k, v in run(engine, [request]).items()}


def _of(requests: list[Request], answers: dict[str, list[int]]) -> dict[str, list[int]]:
    return {request.request_id: answers[request.request_id] for request in requests}


def assert_same(told: Logprobs, expected: Logprobs) -> None:
    assert told.keys() == expected.keys()
    for name, many in expected.items():
        assert many.keys() == told[name].keys()
        for position, one in many.items():
            assert one.logprob == pytest.approx(told[name][position].logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in told[name][position].top]


def steady_requests() -> list[Request]:
    """Those whose steps can be launched ahead, and some whose tokens are chosen on the host."""
    return [request for request in mixed_requests(100, revises=False) if is_steady(request)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("prefill_pages", "pages"), [(600, 600), (60, 40)])
def test_the_same_tokens_as_on_one_worker(
    alone: dict[str, list[int]], prefill_pages: int, pages: int, overlap: bool
) -> None:
    """With plenty of pages, and with so few that both sides wait for memory all the time."""

    async def test() -> None:
        async with pair(prefill_pages, pages, overlap) as (prefill, colocated):
            requests = mixed_requests(40, revises=False)
            told: Logprobs = {}
            answers = await asyncio.gather(*(serve(prefill, colocated, request, told) for request in requests))
            assert_same(told, logprobs_alone())
            assert {r.request_id: a for r, a in zip(requests, answers, strict=True)} == _of(requests, alone)
            for side in (prefill, colocated):
                while side.worker.load.free_pages < side.worker.load.num_pages:
                    await asyncio.sleep(0.001)
                load = side.worker.load
                assert load.num_held == load.num_waiting == load.num_transferring == load.num_denoising == 0
            load = colocated.worker.load
            assert load.num_transfers > 40 and load.num_prefill_tokens == 0 < load.num_refresh_tokens
            assert overlap or load.num_failed_transfers == 0
            page_bytes = colocated.engine.runner.cache.data[:, :, 0].nbytes
            assert load.num_transfer_bytes % page_bytes == 0 and load.num_transfer_bytes > 0

    asyncio.run(asyncio.wait_for(test(), 60))


def test_phases_are_told() -> None:
    async def test() -> None:
        async with pair() as (prefill, colocated):
            request = mixed_requests(5, revises=False)[4]
            stream = prefill.worker.submit(fork(request))
            news = aiter(stream)  # who lets go of it gives up the KV
            first = await anext(news)
            assert first.held is not None and first.num_steps == 1
            queue, forward, *rest = first.seconds
            assert queue >= 0 and forward > 0 and not any(rest)

            def pull(pages: Sequence[int]) -> Future[TransferStats]:
                assert first.held is not None
                return colocated.transfer.pull(
                    prefill.transfer.source(), first.held.pages, pages,
                    stamp=first.held.stamp, key=stream.request.request_id, timeout_s=10.0,
                )  # fmt: skip

            updates = [u async for u in colocated.worker.submit(fork(request, held=first.held), pull)]
            assert updates[-1].seconds[:2] == (0.0, 0.0) and all(updates[-1].seconds[2:])

    asyncio.run(asyncio.wait_for(test(), 30))


def test_held_kv_is_freed_by_abort_and_cannot_be_read_any_more() -> None:
    async def test() -> None:
        async with pair() as (prefill, colocated):
            request = mixed_requests(1, revises=False)[0]
            stream = prefill.worker.submit(fork(request))
            news = aiter(stream)
            held = (await anext(news)).held
            assert held is not None and prefill.worker.load.num_held == 1
            stream.abort("nobody came")
            last = await anext(news)
            assert (last.is_done, last.error, last.is_retryable) == (True, "nobody came", True)
            load = prefill.worker.load
            assert load.free_pages == load.num_pages and load.num_held == 0
            late = colocated.worker.submit(
                fork(request, held=held),
                lambda pages: colocated.transfer.pull(
                    prefill.transfer.source(), held.pages, pages, stamp=held.stamp, key="k", timeout_s=5.0
                ),
            )
            updates = [u async for u in late]
            assert updates[-1].is_retryable and "released" in (updates[-1].error or "")
            load = colocated.worker.load
            assert load.free_pages == load.num_pages and load.num_failed_transfers == 1

    asyncio.run(asyncio.wait_for(test(), 30))


def test_pages_being_read_into_are_not_freed_before_the_transfer_has_ended() -> None:
    async def test() -> None:
        async with pair() as (prefill, colocated):
            request = mixed_requests(1, revises=False)[0]
            news = aiter(prefill.worker.submit(fork(request)))
            held = (await anext(news)).held
            assert held is not None
            transfer: Future[TransferStats] = Future()
            stream = colocated.worker.submit(fork(request, held=held), lambda pages: transfer)
            while not colocated.worker.load.num_transferring:
                await asyncio.sleep(0.001)
            stream.abort()
            updates = [u async for u in stream]
            assert updates[-1].error == "aborted"
            load = colocated.worker.load
            assert load.free_pages < load.num_pages
            transfer.set_exception(TransferError("too late"))
            while colocated.worker.load.free_pages < load.num_pages:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(test(), 30))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefill_pages", [600, 60])
def test_the_same_tokens_when_both_workers_run_ahead(
    alone: dict[str, list[int]], prefill_pages: int, overlap: bool
) -> None:
    async def test() -> None:
        async with pair(prefill_pages, 60, overlap, is_async=True) as (prefill, colocated):
            requests = steady_requests()
            answers = await asyncio.gather(*(serve(prefill, colocated, request) for request in requests))
            assert {r.request_id: a for r, a in zip(requests, answers, strict=True)} == _of(requests, alone)
            for side in (prefill, colocated):
                while side.worker.load.free_pages < side.worker.load.num_pages:
                    await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_everything_is_freed_after_any_mix_of_aborts_and_failures(
    seed: int, overlap: bool, is_async: bool, alone: dict[str, list[int]]
) -> None:
    async def test() -> None:
        rng = random.Random(seed)
        async with pair(120, 80, overlap, is_async=is_async) as (prefill, colocated):
            real_pull = colocated.transfer.pull

            def unreliable(*args: Any, **how: Any) -> Future[TransferStats]:
                if rng.random() < 0.2:
                    failed: Future[TransferStats] = Future()
                    failed.set_exception(TransferError("by chance"))
                    return failed
                return real_pull(*args, **how)

            colocated.transfer.pull = unreliable  # type: ignore[method-assign]

            async def client(request: Request) -> None:
                task = asyncio.ensure_future(serve(prefill, colocated, request))
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 0.05)
                    task.cancel()
                await asyncio.wait({task})
                if not task.cancelled() and task.exception() is None:
                    assert task.result() == alone[request.request_id]

            requests = steady_requests() if is_async else mixed_requests(40, revises=False)
            await asyncio.gather(*(client(request) for request in requests))
            for side in (prefill, colocated):
                load = side.worker.load
                while load.free_pages < load.num_pages or load.num_held or load.num_transferring:
                    await asyncio.sleep(0.005)
                    load = side.worker.load

    asyncio.run(asyncio.wait_for(test(), 60))


def test_the_hand_over_is_exact() -> None:
    """The KV itself, bit for bit, at scattered pages."""

    async def test() -> None:
        async with pair() as (prefill, colocated):
            prefill.engine.scheduler.pool.allocate("x", 3)
            colocated.engine.scheduler.pool.allocate("y", 17)
            request = next(
                r for r in mixed_requests(40, revises=False) if len(r.prompt) > 40 and r.params.unmasking == "threshold"
            )
            news = aiter(prefill.worker.submit(fork(request)))
            held = (await anext(news)).held
            assert held is not None
            there = prefill.engine.runner.cache.data[:, :, list(held.pages)].clone()
            pages: list[int] = []

            def pull(into: Sequence[int]) -> Future[TransferStats]:
                pages.extend(into)
                return colocated.transfer.pull(
                    prefill.transfer.source(), held.pages, into, stamp=held.stamp, key="k", timeout_s=5.0
                )

            denoising = aiter(colocated.worker.submit(fork(request, held=held), pull))
            await anext(denoising)
            here = colocated.engine.runner.cache.data[:, :, pages]
            # The block's own positions are overwritten by its denoising steps; the prompt before it is not.
            num_prompt_pages = len(request.prompt) // 8
            assert num_prompt_pages and pages != list(held.pages)
            assert torch.equal(here[:, :, :num_prompt_pages], there[:, :, :num_prompt_pages])
            colocated.engine.scheduler.pool.release("y")
            prefill.engine.scheduler.pool.release("x")

    asyncio.run(asyncio.wait_for(test(), 30))
