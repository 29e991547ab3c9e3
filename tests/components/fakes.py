"""Workers, a bus and contexts without processes, behind the interfaces that the dispatcher uses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from backend.core.request import Request
from components.protocol import BlockNews, LoadReport, ModelCard, read_dispatch
from components.runtime import Context, Message, WorkerLostError

CARD = ModelCard("abc", 1000, 2, (1,), 2048)


def report(worker_id: int, card: ModelCard = CARD, capacity_tokens: int = 4096) -> LoadReport:
    return LoadReport(worker_id, card, capacity_tokens, 256, 256, 0, 0, 0)


class FakeContext:
    """A request's context; `stop` is what a client that goes away does."""

    def __init__(self, id: str) -> None:
        self._id = id
        self._stopped = asyncio.Event()
        self.metadata: dict[str, str] = {}
        self.children: list[FakeContext] = []

    def id(self) -> str:
        return self._id

    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def stop_generating(self) -> None:
        self._stopped.set()

    def detached(self, id: str) -> Context:
        self.children.append(FakeContext(id))
        return self.children[-1]

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        return asyncio.ensure_future(self._wait())

    async def _wait(self) -> bool:
        return await self._stopped.wait()


class FakeBus:
    is_connected = True
    connected_since = 0.0


Behaviour = Callable[[Request], AsyncGenerator[BlockNews]]


def token_at(request: Request, offset: int) -> int:
    """What every fake worker says at that position: the same on each, as real ones do."""
    return 100 + (request.block_start + offset) % 800


async def completes(request: Request) -> AsyncGenerator[BlockNews]:
    """The whole block, in three pieces."""
    length = request.block.length
    tokens = [token_at(request, offset) for offset in range(length)]
    yield BlockNews(())
    yield BlockNews(tokens[:5])
    await asyncio.sleep(0)
    yield BlockNews(tokens[5:], True)


def breaks(after: int) -> Behaviour:
    """Is lost after that many tokens; with 0 before its prefill."""

    async def behaviour(request: Request) -> AsyncGenerator[BlockNews]:
        if after:
            yield BlockNews([token_at(request, offset) for offset in range(after)])
        await asyncio.sleep(0)
        raise WorkerLostError("Disconnected")

    return behaviour


def hangs(after: int) -> Behaviour:
    """Says no more after that many tokens."""

    async def behaviour(request: Request) -> AsyncGenerator[BlockNews]:
        if after:
            yield BlockNews([token_at(request, offset) for offset in range(after)])
        await asyncio.Event().wait()

    return behaviour


def says(*news: BlockNews) -> Behaviour:
    async def behaviour(request: Request) -> AsyncGenerator[BlockNews]:
        for item in news:
            yield item

    return behaviour


class FakeWorkers:
    """What discovery lists, and what calls meet; stands in for `components.runtime.Workers`."""

    def __init__(self, **behaviours: Behaviour) -> None:
        self.behaviours = {int(name.removeprefix("w")): behaviour for name, behaviour in behaviours.items()}
        self.listed = list(self.behaviours)
        self.calls: list[tuple[int, Message]] = []
        self.num_open = 0

    def ids(self) -> list[int]:
        return list(self.listed)

    async def call(
        self, worker_id: int, message: Message, context: Context, lost: asyncio.Event
    ) -> AsyncGenerator[Message]:
        self.calls.append((worker_id, message))
        self.num_open += 1
        gone = asyncio.ensure_future(lost.wait())
        stopped = context.async_killed_or_stopped()
        news = self.behaviours[worker_id](read_dispatch(message))
        try:
            while True:
                step: asyncio.Future[Any] = asyncio.ensure_future(anext(news, None))
                await asyncio.wait({step, gone, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if not step.done():
                    step.cancel()
                    if stopped.done():
                        return
                    raise WorkerLostError("the worker went silent")
                item = step.result()
                if item is None:
                    return
                yield item.to_wire()
        finally:
            self.num_open -= 1
            gone.cancel()
            stopped.cancel()
            context.stop_generating()
