"""Workers, a bus and contexts without processes, behind the interfaces that the dispatcher uses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from backend.core.request import Request, RequestStatus
from components.protocol import BlockNews, HeldKV, LoadReport, ModelCard, read_dispatch
from components.runtime import Context, Message, WorkerLostError

CARD = ModelCard("abc", 1000, 2, (1,), 2048)


COLOCATED, PREFILL = "colocated_worker", "prefill_worker"


def report(
    worker_id: int,
    card: ModelCard = CARD,
    capacity_tokens: int = 4096,
    component: str = COLOCATED,
    is_draining: bool = False,
    page_size: int = 16,
) -> LoadReport:
    num_pages = capacity_tokens // page_size
    return LoadReport(worker_id, component, card, is_draining, page_size, num_pages, num_pages, 0, 0, 0)


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
    connected_since = 0.0


Behaviour = Callable[[Request], AsyncGenerator[BlockNews]]


def token_at(request: Request, offset: int) -> int:
    """What every fake worker says at that position: the same on each, as real ones do."""
    return 100 + (request.block_start + offset) % 800


async def completes(request: Request) -> AsyncGenerator[BlockNews]:
    """The whole block, or what is left of one that was prefilled elsewhere, in three pieces."""
    tokens = [token_at(request, offset) for offset in range(request.block.frontier, request.block.length)]
    yield BlockNews(())
    yield BlockNews(tokens[:5])
    await asyncio.sleep(0)
    yield BlockNews(tokens[5:], True, num_steps=9)


class FakeKV:
    """KV kept by prefill workers until it is read; in place of NIXL's notifications."""

    def __init__(self) -> None:
        self._read: dict[str, asyncio.Event] = {}
        self._told: dict[str, asyncio.Event] = {}
        self.told: dict[str, HeldKV] = {}
        self.num_held = 0

    def holds(self, worker_id: int, num_tokens: int = 3) -> Behaviour:
        """A prefill worker: commits that many tokens and keeps the KV until it is read."""

        async def behaviour(request: Request) -> AsyncGenerator[BlockNews]:
            tokens = [token_at(request, offset) for offset in range(num_tokens)]
            key = request.request_id
            await asyncio.sleep(0)
            self.num_held += 1
            read = self._read[key] = asyncio.Event()
            try:
                held = HeldKV(worker_id, key, [1, 2], 7, list(enumerate(tokens)))
                yield BlockNews(tokens, held=held, seconds=(0.5, 0.25, 0.0, 0.0, 0.0))
                await read.wait()
                yield BlockNews((), True)
            finally:
                self.num_held -= 1
                del self._read[key]

        return behaviour

    def holds_early(self, worker_id: int, num_tokens: int = 3) -> Behaviour:
        """As `holds`, but lets its KV be read while the prefill runs."""

        async def behaviour(request: Request) -> AsyncGenerator[BlockNews]:
            tokens = [token_at(request, offset) for offset in range(num_tokens)]
            key = request.request_id
            self.num_held += 1
            read = self._read[key] = asyncio.Event()
            try:
                yield BlockNews((), held=HeldKV(worker_id, key, [1, 2], 7, (), is_running=True))
                await asyncio.sleep(0.005)
                if num_tokens == request.block.length:
                    yield BlockNews(tokens, True)
                    return
                held = HeldKV(worker_id, key, [1, 2], 7, list(enumerate(tokens)))
                yield BlockNews(tokens, held=held, seconds=(0.5, 0.25, 0.0, 0.0, 0.0))
                await read.wait()
                yield BlockNews((), True)
            finally:
                self.num_held -= 1
                del self._read[key]

        return behaviour

    async def reads_early(self, request: Request) -> AsyncGenerator[BlockNews]:
        """A colocated worker that reads KV while its prefill runs, and is told later what that committed."""
        key = request.request_id
        told = self._told.setdefault(key, asyncio.Event())
        yield BlockNews(())
        if key in self._read:
            self._read[key].set()
        await told.wait()
        held = self.told[key]
        request.commit(held.commits)
        async for news in completes(request):
            yield news

    async def reads_any(self, request: Request) -> AsyncGenerator[BlockNews]:
        is_early = request.status is RequestStatus.WAITING_FOR_KV and request.block.step == 0
        async for news in (self.reads_early if is_early else self.reads)(request):
            yield news

    def tell(self, held: HeldKV) -> None:
        self.told[held.key] = held
        self._told.setdefault(held.key, asyncio.Event()).set()

    async def reads(self, request: Request) -> AsyncGenerator[BlockNews]:
        """A colocated worker: reads the KV if there is any to read, then completes the block."""
        if request.status is RequestStatus.WAITING_FOR_KV:
            await asyncio.sleep(0)
            if request.request_id not in self._read:
                yield BlockNews((), True, error="KV transfer: gone", is_retryable=True)
                return
            self._read[request.request_id].set()
        async for news in completes(request):
            yield news

    async def cannot_read(self, request: Request) -> AsyncGenerator[BlockNews]:
        """A colocated worker whose transfers fail."""
        if request.status is RequestStatus.WAITING_FOR_KV:
            yield BlockNews((), True, error="KV transfer: broken", is_retryable=True)
            return
        async for news in completes(request):
            yield news


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
        self.asked: list[Message] = []
        self.kv: FakeKV | None = None
        self.num_open = 0

    def ids(self) -> list[int]:
        return list(self.listed)

    async def ask(self, worker_id: int, message: Message) -> Message:
        """What an early reader's prefill has committed."""
        await asyncio.sleep(0)
        self.asked.append(message)
        assert self.kv is not None
        self.kv.tell(HeldKV.from_wire(message))
        return {"is_done": True}

    async def call(
        self, worker_id: int, message: Message, context: Context, lost: asyncio.Event
    ) -> AsyncGenerator[Message]:
        self.calls.append((worker_id, message))
        self.num_open += 1
        gone = asyncio.ensure_future(lost.wait())
        stopped = context.async_killed_or_stopped()
        news = self.behaviours[worker_id](read_dispatch(message)[0])
        step: asyncio.Future[Any] | None = None
        try:
            while True:
                step = asyncio.ensure_future(anext(news, None))
                await asyncio.wait({step, gone, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if not step.done():
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
            if step is not None and step.cancel():
                await asyncio.wait({step})
            await news.aclose()
