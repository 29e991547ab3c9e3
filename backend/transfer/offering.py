"""A transfer as the source of KV: what its pages hold, and which sequences wait to be pulled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from backend.transfer.mailbox import Mailbox
from backend.transfer.stamps import PageStamps

log = logging.getLogger(__name__)


class Offering:
    """The half of a `KVTransfer` that does not depend on who moves the pages."""

    def __init__(self, num_pages: int, on_pulled: Callable[[str], None]) -> None:
        self.stamps = PageStamps(num_pages)
        self._on_pulled = on_pulled
        self._mailbox = Mailbox()
        self._expected: set[str] = set()

    def stamp(self, pages: Sequence[int]) -> int:
        return self.stamps.stamp(pages)

    def invalidate(self, pages: Sequence[int]) -> None:
        self.stamps.invalidate(pages)

    def begin(self, pages: Sequence[int]) -> None:
        self.stamps.set_progress(pages, 0)

    def set_progress(self, pages: Sequence[int], num_layers: int) -> None:
        self.stamps.set_progress(pages, num_layers)

    def expect(self, key: str) -> None:
        self._mailbox.put(lambda: self._expected.add(key))

    def forget(self, key: str) -> None:
        self._mailbox.put(lambda: self._expected.discard(key))

    def _pulled(self, key: str) -> None:
        """A peer says so; in the transfer's thread, which goes on whatever its user does with it."""
        if key in self._expected:
            self._expected.remove(key)
            try:
                self._on_pulled(key)
            except Exception:
                log.exception("nobody took notice that %s has been pulled", key)
