"""One streamed request to an OpenAI endpoint, timed where its user would be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx2

from benchmarks.metrics import Outcome
from benchmarks.workload import Decoding, Question

CONNECT_S = 10.0


class RequestFailed(Exception):
    """The answer did not come whole; the message is the error's name in the results."""


@dataclass
class _Answer:
    """What has arrived of an answer so far."""

    text: str = ""
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    commits: list[float] = field(default_factory=list)

    def add(self, event: dict[str, Any], now: float) -> None:
        """One server-sent event.

        Raises:
            RequestFailed: it reports an error.
        """
        if "error" in event:
            raise RequestFailed("error in the stream")
        piece = ""
        for choice in event.get("choices") or ():
            piece += (choice["delta"].get("content") if "delta" in choice else choice.get("text")) or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        usage = event.get("usage") or {}
        num_tokens = usage.get("completion_tokens", self.num_tokens)
        # Tokens without text (special ones) are commits too; an event without choices only repeats the count.
        if piece or (event.get("choices") and num_tokens > self.num_tokens):
            self.commits.append(now)
        self.text += piece
        self.num_tokens = num_tokens
        self.num_prompt_tokens = usage.get("prompt_tokens", self.num_prompt_tokens)


class Client:
    """Sends questions to one server. As many connections as requests are open; no proxy, no retries.

    Args:
        url: the server, without /v1.
        timeout_s: how long one answer may take from when it was sent; then it counts as an error.
    """

    def __init__(self, url: str, model: str, decoding: Decoding, timeout_s: float = 120.0) -> None:
        self._url, self._model, self._decoding, self._timeout_s = url.rstrip("/"), model, decoding, timeout_s
        self._http = new_http()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def ask(self, index: int, question: Question, intended_s: float, now: Callable[[], float]) -> Outcome:
        """One request, sent at once. Whatever goes wrong is named in the outcome; nothing is raised.

        Args:
            now: seconds from the start of the run.
        """
        answer, error, sent_s = _Answer(), "", now()
        try:
            await asyncio.wait_for(self._receive(question, answer, now), self._timeout_s)
        except RequestFailed as failure:
            error = str(failure)
        except (asyncio.TimeoutError, httpx2.TimeoutException):
            error = "timeout"
        except httpx2.ConnectError:
            error = "cannot connect"
        except httpx2.TransportError:
            error = "disconnected"
        commits = answer.commits
        return Outcome(
            index=index,
            task=question.task,
            intended_s=intended_s,
            sent_s=sent_s,
            finished_s=now(),
            first_token_s=commits[0] if commits else None,
            commit_gaps_s=tuple(later - earlier for earlier, later in zip(commits, commits[1:], strict=False)),
            num_prompt_tokens=answer.num_prompt_tokens,
            num_tokens=answer.num_tokens,
            finish_reason=answer.finish_reason,
            text=answer.text,
            error=error,
            is_correct=answer.text.strip() == question.answer if question.answer and not error else None,
        )

    async def _receive(self, question: Question, answer: _Answer, now: Callable[[], float]) -> None:
        path, body = self.request(question)
        async with self._http.stream("POST", f"{self._url}{path}", json=body) as reply:
            if reply.status_code != 200:
                raise RequestFailed(f"HTTP {reply.status_code}")
            async for event in _events(reply):
                answer.add(event, now())
        if not answer.finish_reason:
            raise RequestFailed("stream ended early")

    def request(self, question: Question) -> tuple[str, dict[str, Any]]:
        """Path and body: text is a chat, token ids are a completion."""
        body: dict[str, Any] = {"model": self._model, "max_tokens": question.max_tokens, "temperature": 0}
        # Counts with every event, so that commits are seen that change no text.
        body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        if annotations := self._decoding.annotations():
            body["nvext"] = {"annotations": annotations}
        if self._decoding.ignore_eos:
            body["ignore_eos"] = True
        if isinstance(question.prompt, str):
            return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": question.prompt}]}
        return "/v1/completions", {**body, "prompt": list(question.prompt)}


async def _events(reply: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream, up to [DONE].

    Raises:
        RequestFailed: it ends before, or holds something else.
    """
    async for line in reply.aiter_lines():
        if line.startswith("event: error"):
            raise RequestFailed("error in the stream")
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except json.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            raise RequestFailed("not JSON")
        yield event
    raise RequestFailed("stream ended early")


def new_http() -> httpx2.AsyncClient:
    """An HTTP client that opens as many connections as it is asked for, and ignores proxies."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(limits=limits, timeout=httpx2.Timeout(None, connect=CONNECT_S), trust_env=False)


async def first_model(url: str) -> str:
    """The first model that the server at `url` lists.

    Raises:
        RequestFailed: it cannot be asked, or has none.
    """
    async with new_http() as http:
        try:
            reply = await http.get(f"{url.rstrip('/')}/v1/models", timeout=CONNECT_S)
            return str(reply.raise_for_status().json()["data"][0]["id"])
        except httpx2.HTTPError as error:
            raise RequestFailed(f"{url} does not list its models: {error!r}") from None
        except (LookupError, ValueError, TypeError):
            raise RequestFailed(f"{url} serves no model") from None
