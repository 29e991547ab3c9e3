"""Text in and out for the KServe Tensor route, which Dynamo passes on untouched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

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
        self._template = _chat_template(directory)

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text, as /v1/completions makes them."""
        return self.tokenizer.encode(text).ids

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a chat whose one user message is `text`.

        Raises:
            InvalidRequestError: the model has no chat template.
        """
        if self._template is None:
            raise InvalidRequestError("the model has no chat template; send the parameter chat_template=false")
        rendered = self._template.render(
            messages=[{"role": "user", "content": text}], add_generation_prompt=True, bos_token="", eos_token=""
        )
        return self.tokenizer.encode(rendered, add_special_tokens=False).ids


def _chat_template(directory: Path):  # type: ignore[no-untyped-def]
    source = None
    config = directory / "tokenizer_config.json"
    if config.exists():
        source = json.loads(config.read_text()).get("chat_template")
    file = directory / "chat_template.jinja"
    if file.exists():
        source = file.read_text()
    if not isinstance(source, str):
        return None
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)


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
