"""Text in and out where no frontend of Dynamo's does it: the KServe Tensor route, and `sangam generate`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from backend.core.sampling_params import InvalidRequestError

_NO_CHARACTER = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of UTF-8, so no more tokens than this make one character."""


class TextProcessor:
    """The tokenizer and the chat template of a checkpoint directory."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        path = directory / "tokenizer_config.json"
        config = json.loads(path.read_text()) if path.exists() else {}
        self._template = _chat_template(directory, config)
        self._named_tokens = {name: _named_token(config.get(name)) for name in ("bos_token", "eos_token", "unk_token")}

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text, as /v1/completions makes them."""
        return self.tokenizer.encode(text).ids

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a chat whose one user message is `text`.

        Raises:
            InvalidRequestError: the model has no chat template.
        """
        if self._template is None:
            raise InvalidRequestError("the model has no chat template; send the parameter chat_template=false")
        return self.encode_messages([{"role": "user", "content": text}])

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat, up to where the model's next message begins.

        Raises:
            InvalidRequestError: the model has no chat template, or its template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequestError("messages: the model has no chat template; send a prompt instead")
        try:
            rendered = self._template.render(messages=messages, add_generation_prompt=True, **self._named_tokens)
        except TemplateError as error:
            raise InvalidRequestError(f"messages: the model's chat template refuses them: {error}") from None
        return self.tokenizer.encode(rendered, add_special_tokens=False).ids


def _chat_template(directory: Path, config: Mapping[str, Any]) -> Template | None:
    source = config.get("chat_template")
    file = directory / "chat_template.jinja"
    if file.exists():
        source = file.read_text()
    if not isinstance(source, str):
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


def _refuse(reason: str) -> NoReturn:
    """What templates call for messages that they cannot render."""
    raise TemplateError(reason)


def _named_token(value: object) -> str:
    """A special token as tokenizer_config.json names it: text, or an object that holds it."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


class TextStream:
    """Tokens to text, append-only: whole characters, and nothing that a stop string may still claim.

    Token by token, so that neither the text nor where it stops depends on how tokens come together.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], min_tokens: int = 0) -> None:
        self._characters = _CharacterStream(tokenizer)
        self._num_unchecked = max(min_tokens - 1, 0)
        """Tokens still to come whose text no stop string may claim."""
        self._stop = [text for text in stop if text]
        self._held = ""
        self.is_stopped = False

    def push(self, tokens: Sequence[int]) -> tuple[list[int], str]:
        """Those of `tokens` that the answer keeps, and the text that they make certain.

        The token that completes a stop string is the last one kept; its text is cut before the string.
        """
        certain = ""
        for num_kept, token in enumerate(tokens):
            if self.is_stopped:
                return list(tokens[:num_kept]), certain
            certain += self._push(token)
        return list(tokens), certain

    def _push(self, token: int) -> str:
        self._held += self._characters.push(token)
        if self._num_unchecked:
            self._num_unchecked -= 1
            certain, self._held = self._held, ""
            return certain
        first = min((at for text in self._stop if (at := self._held.find(text)) >= 0), default=-1)
        if first >= 0:
            self.is_stopped = True
            certain, self._held = self._held[:first], ""
            return certain
        keep = max((_overlap(self._held, text) for text in self._stop), default=0)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return certain

    def finish(self) -> str:
        """What was held back, now that nothing follows. Half a character is dropped."""
        rest, self._held = self._held, ""
        return rest


class _CharacterStream:
    """Text of token after token, held back while it ends within a character.

    Ours because tokenizers' DecodeStream raises on bytes that turn out to be no character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token for token, kind in added.items() if kind.special}
        self._window: list[int] = []
        self._num_read = 0
        self._text = ""

    def push(self, token: int) -> str:
        if token in self._special:
            return ""
        self._window.append(token)
        # Decoded behind the tokens before it: a decoder may treat the start of a text differently.
        text = self._tokenizer.decode(self._window)
        if text == self._text:  # it may still show with the next one, as a space at the very start does
            self._num_read += 1
            return ""
        if text.endswith(_NO_CHARACTER) and len(self._window) - self._num_read < _LONGEST_CHARACTER:
            return ""
        new = text[len(self._text) :]
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        self._text = self._tokenizer.decode(self._window)
        return new


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
