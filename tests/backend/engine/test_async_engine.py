from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
import torch

from backend.attention.kv_cache import KVCache
from backend.core.page_pool import PagePool
from backend.core.request import Request
from backend.core.sampling_params import InvalidRequestError, SamplingParams
from backend.core.scheduler import Scheduler, SchedulerConfig
from backend.engine.async_engine import AsyncEngine
from backend.engine.block_stream import BlockUpdate, EngineDeadError
from backend.engine.engine import Engine
from backend.engine.model_runner import ModelRunner
from backend.models.config import ModelConfig
from backend.models.llada import Llada
from tests.backend.engine.test_engine import run as serve
from tests.backend.engine.test_engine import small_engine

CONFIG = ModelConfig("llada", 62, 64, 32, 48, 1, 4, 4, 512, 1e-5, 10000.0, 60, (61,))
SLOW = SamplingParams(max_tokens=32, canvas_length=32, unmasking="quota", steps_per_block=32)


def request(name: str, params: SamplingParams = SLOW, prompt: int = 20) -> Request:
    return Request(name, [1] * prompt, params, 0.0)


@asynccontextmanager
async def running(pages: int = 64, tau: int | Literal["auto"] = 1000) -> AsyncIterator[AsyncEngine]:
    torch.manual_seed(0)
    model = Llada(CONFIG).eval().requires_grad_(False)
    cache = KVCache(1, pages, 8, 4, 8, torch.float32, torch.device("cpu"))
    inner = Engine(ModelRunner(model, cache), Scheduler(SchedulerConfig(tau, 64), PagePool(pages, 8)))
    engine = AsyncEngine(inner)
    engine.start()
    yield engine
    await engine.stop()


def run(test: Callable[[AsyncEngine], Any], pages: int = 64) -> None:
    async def main() -> None:
        async with running(pages) as engine:
            await asyncio.wait_for(test(engine), 30)

    asyncio.run(main())


async def collect(engine: AsyncEngine, name: str) -> list[BlockUpdate]:
    return [update async for update in engine.submit(request(name))]


def test_a_budget_that_tunes_itself_changes_no_token_and_shows_its_bound() -> None:
    async def main(tau: int | Literal["auto"]) -> tuple[list[list[int]], int]:
        async with running(tau=tau) as engine:
            many = await asyncio.gather(*(collect(engine, str(i)) for i in range(8)))
            return [[t for u in updates for t in u.tokens] for updates in many], engine.load.max_older

    fixed, auto = asyncio.run(main(1000)), asyncio.run(main("auto"))
    assert fixed[0] == auto[0]
    assert fixed[1] == 0 and 1 <= auto[1] < 64


def test_streams_what_the_frontier_moved_over_and_says_when_it_is_done() -> None:
    async def test(engine: AsyncEngine) -> None:
        many = await asyncio.gather(*(collect(engine, str(i)) for i in range(8)))
        for updates in many:
            assert [u.is_done for u in updates] == [False] * (len(updates) - 1) + [True]
            assert sum(len(u.tokens) for u in updates) == 32
            assert updates[-1].num_steps == 32
            assert all(seconds >= 0 for seconds in updates[-1].seconds)
            assert [t for u in updates for t in u.tokens] == [t for u in many[0] for t in u.tokens]
        load = engine.load
        assert (load.free_pages, load.num_waiting, load.num_denoising) == (64, 0, 0)
        assert load.num_prefill_tokens == 8 * 52 and load.num_denoising_tokens == 8 * 31 * 32

    run(test)


def test_abort_frees_the_pages_and_ends_the_stream() -> None:
    async def test(engine: AsyncEngine) -> None:
        stream = engine.submit(request("a"))
        updates = []
        async for update in stream:
            updates.append(update)
            stream.abort()
            stream.abort()
        assert updates[-1].is_done and updates[-1].error == "aborted"
        assert engine.load.free_pages == 64
        assert len(await collect(engine, "a")) > 0

    run(test)


def test_a_reader_that_walks_away_frees_the_pages() -> None:
    async def test(engine: AsyncEngine) -> None:
        updates = aiter(engine.submit(request("a")))
        await anext(updates)
        await updates.aclose()  # type: ignore[attr-defined]
        while engine.load.free_pages < 64:
            await asyncio.sleep(0.005)

    run(test)


def test_what_never_fits_is_refused_and_harms_nobody() -> None:
    async def test(engine: AsyncEngine) -> None:
        good = asyncio.ensure_future(collect(engine, "good"))
        with pytest.raises(InvalidRequestError, match="do not fit"):
            async for _ in engine.submit(request("big", prompt=500)):
                pass
        assert (await good)[-1].error is None

    run(test)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_step_loop_is_told_to_everyone() -> None:
    async def test(engine: AsyncEngine) -> None:
        waiting = asyncio.ensure_future(collect(engine, "a"))

        def broken(*plan: object) -> None:
            raise RuntimeError("no memory left on the device")

        engine._engine.runner.run = broken  # type: ignore[method-assign, assignment]
        with pytest.raises(EngineDeadError, match="no memory left"):
            await waiting
        assert engine.died is not None and "no memory left" in await engine.died
        with pytest.raises(EngineDeadError):
            await collect(engine, "b")

    run(test)


def test_an_id_that_comes_again_while_its_step_runs_gets_its_own_tokens() -> None:
    async def main() -> None:
        wanted = Request("alone", [7] * 12, SLOW, 0.0)
        serve(small_engine(), [wanted])
        engine = AsyncEngine(small_engine(is_async=True))
        engine.start()
        for _ in range(10):
            old = engine.submit(Request("same", [3, 9, 2], SLOW, 0.0))
            async for update in old:
                if update.tokens:
                    break
            old.abort()
            new = engine.submit(Request("same", [7] * 12, SLOW, 0.0))
            assert [token async for update in new for token in update.tokens] == wanted.answer()[0]
        await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 60))
