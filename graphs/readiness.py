"""Waiting until processes serve and the model really answers."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit

import httpx2

INTERVAL_S = 0.2
ERRORS_TO_BELIEVE = 10


class NotServing(RuntimeError):
    """Waiting longer will not help; the message says what was seen."""


Client = httpx2.AsyncClient


def new_client() -> Client:
    """An HTTP client for this machine: no proxy from the environment, patient with a slow first answer."""
    return Client(trust_env=False, timeout=httpx2.Timeout(5.0, read=300.0))


async def listening(url: str, default_port: int, timeout_s: float) -> None:
    """Waits until something accepts connections at `url`.

    Raises:
        NotServing: nothing does.
    """
    address = urlsplit(url if "//" in url else f"//{url}")
    host, port = address.hostname or "127.0.0.1", address.port or default_port
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout_s)
        except (OSError, asyncio.TimeoutError) as error:
            if asyncio.get_running_loop().time() >= deadline:
                raise NotServing(f"nothing listens at {url}: {error}") from None
            await asyncio.sleep(INTERVAL_S / 4)
        else:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            return


async def healthy(http: Client, status_url: str) -> None:
    """Waits until `status_url`/health says so."""
    while True:
        with contextlib.suppress(httpx2.TransportError):
            if (await http.get(f"{status_url}/health")).is_success:
                return
        await asyncio.sleep(INTERVAL_S)


async def answering(http: Client, url: str, model: str) -> None:
    """Waits until the OpenAI API at `url` lists `model` and has answered one token.

    Raises:
        NotServing: the model is listed but keeps answering with errors.
    """
    while not await _listed(http, url, model):
        await asyncio.sleep(INTERVAL_S)
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    num_errors = 0
    while True:
        try:
            reply = await http.post(f"{url}/v1/chat/completions", json=body)
            if reply.is_success:
                return
            if reply.status_code not in (404, 503):  # those two: not all of it has been discovered yet
                num_errors += 1
            problem = f"HTTP {reply.status_code} {reply.text.strip()[:500]}"
        except httpx2.TransportError as error:
            num_errors += 1
            problem = repr(error)
        if num_errors >= ERRORS_TO_BELIEVE:
            raise NotServing(f"the model {model} is there but does not answer: {problem}")
        await asyncio.sleep(INTERVAL_S)


async def _listed(http: Client, url: str, model: str) -> bool:
    try:
        reply = await http.get(f"{url}/v1/models")
        return reply.is_success and model in {entry["id"] for entry in reply.json()["data"]}
    except httpx2.TransportError:
        return False
