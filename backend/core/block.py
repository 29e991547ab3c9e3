"""The canvas positions that are denoised together, and what is known of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from backend.core.logprobs import TokenLogprobs


class IllegalTransitionError(RuntimeError):
    """A status change that the life of a request does not have: a bug, never a user's fault."""


class Block:
    """The `length` canvas positions denoised together; `offset` 0 is the block's first position.

    Masked positions are tracked by position (`tokens[offset] is None`), never by comparing ids: a
    prompt or an answer may contain any id.
    """

    def __init__(
        self, index: int, length: int, attempt: int = 1, known: Sequence[int] = (), is_provisional: bool = False
    ) -> None:
        self.index = index
        self.length = length
        self.attempt = attempt
        self.known = tuple(known)
        self.tokens: list[int | None] = [None] * length
        self.commit_steps: list[int | None] = [None] * length
        """The step that committed each offset."""
        self.logprobs: dict[int, TokenLogprobs] = {}
        """By offset, of committed tokens, if the request asks for them or revises by them."""
        self.frontier = 0
        """How many tokens, from the first on, are final."""
        self._num_leading = 0
        self.num_masked = length
        self.step = 0
        self.is_provisional = is_provisional
        """Whether any of its tokens may still be taken back: then none may be streamed."""
        self.is_revised = False

    def commit(self, offset: int, token: int) -> int:
        """Makes `token` final at `offset` and returns the token that is now there.

        A token that an earlier attempt already streamed (`known`) stands, whatever this attempt says.
        """
        if self.tokens[offset] is not None:
            raise IllegalTransitionError(f"block {self.index} offset {offset} is already committed")
        if offset < len(self.known):
            token = self.known[offset]
        self.tokens[offset] = token
        self.commit_steps[offset] = self.step
        self.num_masked -= 1
        if offset == self._num_leading:
            while self._num_leading < self.length and self.tokens[self._num_leading] is not None:
                self._num_leading += 1
            if not self.is_provisional:
                self.frontier = self._num_leading
        return token

    def settle(self) -> None:
        """None of its tokens will be taken back any more."""
        self.is_provisional = False
        self.frontier = self._num_leading

    def revised(self, offsets: Sequence[int]) -> Block:
        """This block with the tokens at `offsets` taken back, the only time that this happens."""
        again = Block(self.index, self.length, self.attempt, self.known, is_provisional=True)
        again.step = self.step
        again.is_revised = True
        for offset, token in enumerate(self.tokens):
            if offset not in offsets and token is not None:
                again.commit(offset, token)
        again.commit_steps = [None if i in offsets else step for i, step in enumerate(self.commit_steps)]
        again.logprobs = {i: of for i, of in self.logprobs.items() if i not in offsets}
        return again

    def committed_prefix(self) -> list[int]:
        prefix: list[Any] = self.tokens[: self.frontier]  # all are tokens there
        return prefix

    def logprobs_at(self, offsets: Iterable[int]) -> tuple[TokenLogprobs, ...]:
        """Of the tokens at these offsets; nothing if there are none."""
        return tuple(self.logprobs[offset] for offset in offsets) if self.logprobs else ()
