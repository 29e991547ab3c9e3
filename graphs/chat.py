"""Talk to a served model and watch it denoise. Lines may also be piped in: one prompt a line, plain answers."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from graphs import sampling_flags
from graphs.sampling_flags import DEFAULT_BLOCK_LENGTH, DLLM_FLAGS, STANDARD_FLAGS

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessageParam


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--model", help="which of its models (default: the first)")
    sampling_flags.add(parser)
    parser.set_defaults(run=run)


@dataclass
class Answer:
    """An answer as far as it has streamed."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str = ""
    started: float = field(default_factory=time.monotonic)

    def footer(self) -> str:
        elapsed_s = time.monotonic() - self.started
        return f"{self.num_tokens} tokens, {elapsed_s:.1f} s, {self.num_tokens / max(elapsed_s, 1e-9):.1f} tokens/s"

    def masked(self, block_length: int) -> str:
        """A placeholder for the still masked positions of the current block, at the width of its neighbours."""
        if self.finish_reason:
            return ""
        width = round(len(self.text) / self.num_tokens) if self.num_tokens else 3
        return "░" * (max(width, 1) * (block_length - self.num_tokens % block_length))


def run(arguments: argparse.Namespace) -> int:
    """Answers prompts until the input ends; 1 if the server never answered or a piped prompt failed."""
    from openai import OpenAI, OpenAIError

    client = OpenAI(base_url=f"{arguments.url.rstrip('/')}/v1", api_key="none", max_retries=0)
    console, interactive = Console(highlight=False), sys.stdin.isatty()
    try:
        model = arguments.model or next(iter(client.models.list())).id
    except (OpenAIError, StopIteration) as error:
        print(f"sangam chat: {explain(error, arguments.url)}", file=sys.stderr)
        return 1
    if interactive:
        console.print(Text(f"{model} at {arguments.url}; an empty line starts over, Ctrl-D quits", "dim"))
    status = 0
    messages: list[ChatCompletionMessageParam] = []
    for prompt in _prompts(interactive):
        if not prompt or not interactive:
            messages = []  # piped lines have nothing to do with each other
        if not prompt:
            continue
        messages.append({"role": "user", "content": prompt})
        answers = stream(client, messages, request(arguments, model))
        show = _show_live if interactive else _show_plain
        try:
            answer = show(console, answers, arguments.block_length or DEFAULT_BLOCK_LENGTH)
            messages.append({"role": "assistant", "content": answer.text})
        except OpenAIError as error:
            print(f"sangam chat: {explain(error, arguments.url)}", file=sys.stderr)
            messages.pop()
            status = 0 if interactive else 1
        except KeyboardInterrupt:
            messages.pop()
            if not interactive:
                return 130
    return status


def request(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """What to ask for, messages excepted; options that were not given are left to the server."""
    body = {"model": model} | {name: getattr(arguments, name) for name in STANDARD_FLAGS}
    extensions = {name: body.pop(name) for name in ("min_tokens", "top_k", "min_p")}
    # Token counts with every chunk: Dynamo knows the second key, the client's types do not.
    extra: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    extra |= {name: value for name, value in extensions.items() if value is not None}
    options = [f"dllm.{name}:{value}" for name in DLLM_FLAGS if (value := getattr(arguments, name)) is not None]
    if options:
        extra["nvext"] = {"annotations": options}
    return {key: value for key, value in body.items() if value is not None} | {"extra_body": extra}


def stream(client: OpenAI, messages: Sequence[ChatCompletionMessageParam], request: dict[str, Any]) -> Iterator[Answer]:
    """The answer, each time it has grown; always the same object.

    Raises:
        openai.OpenAIError: the server cannot be reached, refuses, or fails on the way.
    """
    answer = Answer()
    with client.chat.completions.create(messages=messages, stream=True, **request) as chunks:
        for chunk in chunks:
            if chunk.usage:
                answer.num_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                answer.text += choice.delta.content or ""
                answer.finish_reason = choice.finish_reason or ""
            yield answer


def explain(error: Exception, url: str) -> str:
    """An error in one line."""
    from openai import APIConnectionError, APIStatusError

    if isinstance(error, StopIteration):
        return f"{url} serves no model yet"
    if isinstance(error, APIConnectionError):
        return f"no server at {url} ({error.__cause__ or error})"
    if isinstance(error, APIStatusError):
        body = error.body if isinstance(error.body, dict) else {}
        return f"HTTP {error.status_code}: {' '.join(str(body.get('message') or error.message).split())}"
    return " ".join(str(error).split())


def _prompts(interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() history and editing)
    while True:
        try:
            yield input("› ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return


def _show_live(console: Console, answers: Iterator[Answer], block_length: int) -> Answer:
    answer = Answer()
    with Live(console=console, refresh_per_second=15) as live:
        live.update(Text(answer.masked(block_length), "dim"))
        for answer in answers:
            lines = Text.assemble(answer.text, (answer.masked(block_length), "dim")).wrap(console, console.width)
            # What has scrolled off the screen cannot be redrawn: all of it only once it is final.
            first = 0 if answer.finish_reason else max(len(lines) - console.height + 2, 0)
            live.update(Group(*lines[first:], Text(answer.footer(), "dim")))
    return answer


def _show_plain(console: Console, answers: Iterator[Answer], block_length: int) -> Answer:
    answer, shown = Answer(), 0
    for answer in answers:
        print(answer.text[shown:], end="", flush=True)
        shown = len(answer.text)
    print()
    return answer
