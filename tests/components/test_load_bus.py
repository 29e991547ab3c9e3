"""Over a real NATS server."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import nats
import pytest

from components.load_bus import LoadBus
from components.protocol import LoadReport
from graphs.launch import nats_program
from tests.components.fakes import report


class Server:
    """A NATS server on a port of its own, to be killed and started again."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        argv = nats_program(self.port).argv
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 15
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "the NATS server does not listen"
                time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def run(test: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
    server = Server()
    server.start()
    try:
        asyncio.run(asyncio.wait_for(test(server), 30))
    finally:
        server.kill()


@asynccontextmanager
async def buses(server: Server, *namespaces: str) -> AsyncIterator[list[LoadBus]]:
    made = [await LoadBus.connect(server.url, namespace) for namespace in namespaces]
    try:
        yield made
    finally:
        for bus in made:
            await bus.close()


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        await asyncio.sleep(0.01)


def test_every_listener_of_the_namespace_hears_a_report() -> None:
    async def test(server: Server) -> None:
        async with buses(server, "here", "here", "here", "elsewhere") as (worker, *listeners):
            heard: list[list[LoadReport]] = [[], [], []]
            for bus, reports in zip(listeners, heard, strict=True):
                await bus.listen(reports.append)
                await bus._client.flush()
            await worker.publish(report(7))
            await until(lambda: heard[0] == heard[1] == [report(7)], "the report")
            assert heard[2] == []

    run(test)


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"worker_id": 1}', b"7"])
def test_what_cannot_be_read_is_skipped(garbage: bytes) -> None:
    async def test(server: Server) -> None:
        async with buses(server, "here", "here") as (worker, router):
            heard: list[LoadReport] = []
            await router.listen(heard.append)
            await router._client.flush()
            stranger = await nats.connect(server.url)
            await stranger.publish("sangam.here.load", garbage)
            await stranger.close()
            await worker.publish(report(7))
            await until(lambda: heard == [report(7)], "the report after it")

    run(test)


def test_a_server_that_comes_back_is_found_again() -> None:
    async def test(server: Server) -> None:
        async with buses(server, "here", "here") as (worker, router):
            heard: list[LoadReport] = []
            await router.listen(heard.append)
            before = router.connected_since
            server.kill()
            await until(lambda: not worker.is_connected and not router.is_connected, "the loss to be noticed")
            await worker.publish(report(1))

            server.start()
            await until(lambda: worker.is_connected and router.is_connected, "a new connection")
            assert router.connected_since > before

            async def heard_again() -> None:
                while not heard:
                    await worker.publish(report(2))
                    await asyncio.sleep(0.05)

            await asyncio.wait_for(heard_again(), 10)
            assert heard[0] == report(2), "what was published without a connection is worth nothing"

    run(test)


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    server = Server()

    async def test() -> None:
        connecting = asyncio.create_task(LoadBus.connect(server.url, "here"))
        await asyncio.sleep(0.3)
        assert not connecting.done()
        server.start()
        bus = await asyncio.wait_for(connecting, 15)
        assert bus.is_connected
        await bus.close()

    try:
        asyncio.run(asyncio.wait_for(test(), 30))
    finally:
        server.kill()
