from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from backend.attention.kv_cache import KVCache
from backend.transfer.base import KVTransfer, TransferError
from backend.transfer.local import LocalNetwork, LocalTransfer
from components.kv_sources import KVSources
from components.runtime import Message

NETWORK = LocalNetwork()


def local(name: str) -> LocalTransfer:
    cache = KVCache(1, 4, 8, 1, 8, torch.float32, torch.device("cpu"))
    return LocalTransfer(cache, name, "m", lambda key: None, NETWORK)


class PrefillWorkers:
    """The endpoint `kv_source` of some prefill workers, in place of Dynamo's client."""

    def __init__(self, *ids: int) -> None:
        self.listed = list(ids)
        self.transfers = {worker_id: local(f"p{worker_id}") for worker_id in ids}
        self.answers: dict[int, Callable[[], Coroutine[Any, Any, Message]]] = {}

    def ids(self) -> list[int]:
        return list(self.listed)

    async def ask(self, worker_id: int, message: Message) -> Message:
        if worker_id in self.answers:
            return await self.answers[worker_id]()
        return {"source": self.transfers[worker_id].source().to_wire()}


class Sources(KVSources):
    """With agents made by `new`, instead of NIXL's."""

    def __init__(self, workers: PrefillWorkers, new: Callable[[], KVTransfer]) -> None:
        super().__init__(workers, None, "c", "m")  # type: ignore[arg-type]
        self.new = new

    def _new_transfer(self) -> KVTransfer:
        return self.new()


def run(test: Callable[[PrefillWorkers, Sources], Coroutine[Any, Any, None]]) -> None:
    workers = PrefillWorkers(1, 2)
    own = local("c")
    sources = Sources(workers, lambda: own)

    async def main() -> None:
        watching = asyncio.ensure_future(sources.watch())
        try:
            await test(workers, sources)
        finally:
            watching.cancel()

    try:
        asyncio.run(asyncio.wait_for(main(), 20))
    finally:
        for transfer in (own, *workers.transfers.values()):
            transfer.close()


async def hangs() -> Message:
    await asyncio.Event().wait()
    return {}


def test_a_source_is_fetched_once() -> None:
    async def test(workers: PrefillWorkers, sources: Sources) -> None:
        many = await asyncio.gather(*(sources.get(1, 5.0) for _ in range(5)))
        assert {id(transfer) for transfer, _ in many} == {id(many[0][0])}
        assert many[0][1] == workers.transfers[1].source()

    run(test)


def test_one_that_waits_for_too_long_does_not_spoil_it_for_others() -> None:
    async def test(workers: PrefillWorkers, sources: Sources) -> None:
        asked = asyncio.Event()

        async def late() -> Message:
            await asked.wait()
            return {"source": workers.transfers[1].source().to_wire()}

        workers.answers[1] = late
        patient = asyncio.ensure_future(sources.get(1, 10.0))
        with pytest.raises(TransferError, match="within 0.05 s"):
            await sources.get(1, 0.05)
        asked.set()
        assert (await patient)[1] == workers.transfers[1].source()
        assert (await sources.get(2, 5.0))[1] == workers.transfers[2].source()

    run(test)


def test_a_worker_that_leaves_while_it_is_waited_for_costs_a_transfer_and_no_more() -> None:
    async def test(workers: PrefillWorkers, sources: Sources) -> None:
        workers.answers[1] = hangs
        waiting = asyncio.ensure_future(sources.get(1, 1.5))
        await asyncio.sleep(0.1)
        workers.listed = [2]
        with pytest.raises(TransferError):
            await waiting
        assert (await sources.get(2, 5.0))[1] == workers.transfers[2].source()

    run(test)


def test_an_agent_that_cannot_be_made_is_tried_again() -> None:
    async def test(workers: PrefillWorkers, sources: Sources) -> None:
        made = sources.new
        failures = [ValueError("no memory can be registered"), OSError("no device")]

        def fails_at_first() -> KVTransfer:
            if failures:
                raise failures.pop()
            return made()

        sources.new = fails_at_first
        with pytest.raises(TransferError, match="no device"):
            await sources.get(1, 5.0)
        while failures:
            with pytest.raises(TransferError):
                await sources.get(1, 5.0)
        assert (await sources.get(1, 5.0))[0] is made()

    run(test)


@pytest.mark.parametrize("answer", [{}, {"source": {}}, {"source": None}])
def test_an_odd_answer_is_a_failed_transfer_and_asked_for_again(answer: Message) -> None:
    async def odd() -> Message:
        return answer

    async def test(workers: PrefillWorkers, sources: Sources) -> None:
        workers.answers[1] = odd
        with pytest.raises(TransferError, match="cannot be read from"):
            await sources.get(1, 5.0)
        del workers.answers[1]
        assert (await sources.get(1, 5.0))[1] == workers.transfers[1].source()

    run(test)


def test_a_block_that_is_given_up_cancels_nothing() -> None:
    async def test(workers: PrefillWorkers, sources: Sources) -> None:
        workers.answers[1] = hangs
        given_up = asyncio.ensure_future(sources.get(1, 5.0))
        await asyncio.sleep(0.05)
        given_up.cancel()
        await asyncio.wait({given_up})
        assert (await sources.get(2, 5.0))[1] == workers.transfers[2].source()

    run(test)
