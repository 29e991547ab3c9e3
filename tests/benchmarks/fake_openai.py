"""An OpenAI server that does what the prompt says: the load generator's other side, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any


class FakeOpenAI:
    """Prompts: `pieces N` streams N tokens and ends well; `status N` is refused; `error` fails in the stream;
    `cut` breaks off; `garbage` is no JSON; `hang` says nothing for ever. Token ids get two tokens without
    text, any other text a single one.

    Args:
        delay_s: before each piece.
        at_once: how many answers it works on at the same time.
    """

    def __init__(self, delay_s: float = 0.0, at_once: int = 1000) -> None:
        self._delay_s, self._room = delay_s, asyncio.Semaphore(at_once)
        self._connections: list[asyncio.Future[None]] = []
        self.bodies: list[dict[str, Any]] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Its URL, while the block runs."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.append(asyncio.ensure_future(self._connection(reader, writer)))

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                await self._serve(reader, writer)
            finally:
                writer.close()
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next((int(h.partition(":")[2]) for h in head.split("\r\n") if h.startswith("content-length")), 0)
        body = await reader.readexactly(length)
        if head.startswith("get /v1/models"):
            await self._reply(writer, 200, json.dumps({"data": [{"id": "fake"}]}).encode())
        else:
            async with self._room:
                await self._answer(writer, json.loads(body))

    async def _reply(self, writer: asyncio.StreamWriter, status: int, body: bytes = b"") -> None:
        writer.write(f"HTTP/1.1 {status} Whatever\r\nConnection: close\r\n\r\n".encode() + body)
        await writer.drain()

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        prompt = body["messages"][0]["content"] if "messages" in body else "pieces 2"
        what, _, number = prompt.partition(" ")
        if what == "status":
            return await self._reply(writer, int(number))
        await self._reply(writer, 200)
        for count in range(1, 1 + (int(number) if number.isdigit() else 1)):
            await asyncio.sleep(self._delay_s)
            choice = {"delta": {"content": f"{count} "}} if "messages" in body else {"text": ""}
            usage = {"prompt_tokens": 5, "completion_tokens": count}
            await self._event(writer, {"choices": [{**choice, "finish_reason": None}], "usage": usage})
        if what == "hang":
            await asyncio.sleep(60)
        elif what == "error":
            await self._event(writer, {"error": {"message": "no", "code": 500}})
        elif what == "garbage":
            writer.write(b"data: {\n\n")
        elif what != "cut":
            last = {"delta": {}} if "messages" in body else {"text": ""}
            await self._event(writer, {"choices": [{**last, "finish_reason": "stop"}], "usage": None})
            await self._event(writer, {"choices": [], "usage": usage})
            writer.write(b"data: [DONE]\n\n")

    async def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        writer.write(f"data: {json.dumps(event)}\n\n".encode())
        await writer.drain()
