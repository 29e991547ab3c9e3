"""The KV pages of one worker: who owns which."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable


class PagePoolError(RuntimeError):
    """The pool was misused or does not balance: a bug, never a user's fault."""


class PagePool:
    """`num_pages` pages of `page_size` tokens. Every page is free or has exactly one owner.

    Free pages are kept as sorted runs and an owner gets one run where one is long enough: whoever
    reads the pages (a CPU kernel, a transfer) is faster on neighbours, and no one depends on it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages={num_pages} and page_size={page_size} must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_free = num_pages
        self._numbers = list(range(num_pages))
        """A slice of it is a run's pages, sooner than a range makes them."""
        self._runs: list[tuple[int, int]] = [(0, num_pages)]
        self._owned: dict[Hashable, list[tuple[int, int]]] = {}
        """Runs, too: giving pages back costs nothing for each page."""

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, owner: Hashable, num_pages: int) -> list[int] | None:
        """Gives `owner` that many pages, or None (and changes nothing) if too few are free."""
        if owner in self._owned:
            raise PagePoolError(f"{owner!r} already holds pages")
        if num_pages > self.num_free:
            return None
        pages: list[int] = []
        owned = self._owned[owner] = []
        whole = next((i for i, (start, end) in enumerate(self._runs) if end - start >= num_pages), 0)
        while len(pages) < num_pages:
            start, end = self._runs.pop(whole)
            taken = min(end - start, num_pages - len(pages))
            pages += self._numbers[start : start + taken]
            owned.append((start, start + taken))
            if start + taken < end:
                self._runs.insert(whole, (start + taken, end))
        self.num_free -= num_pages
        return pages

    def release(self, owner: Hashable) -> None:
        """Takes back all pages of `owner`. Raises PagePoolError if it holds none."""
        try:
            runs = self._owned.pop(owner)
        except KeyError:
            raise PagePoolError(f"{owner!r} holds no pages") from None
        for start, end in runs:
            self.num_free += end - start
            self._insert(start, end)

    def _insert(self, start: int, end: int) -> None:
        at = bisect_left(self._runs, (start, end))
        if at < len(self._runs) and self._runs[at][0] == end:
            end = self._runs.pop(at)[1]
        if at and self._runs[at - 1][1] == start:
            at -= 1
            start = self._runs.pop(at)[0]
        self._runs.insert(at, (start, end))

    def check(self) -> None:
        """Raises PagePoolError unless every page is free or owned exactly once."""
        free = [page for start, end in self._runs for page in range(start, end)]
        owned = [page for runs in self._owned.values() for start, end in runs for page in range(start, end)]
        if len(free) != self.num_free or sorted(free + owned) != list(range(self.num_pages)):
            raise PagePoolError(f"unbalanced: {self.num_free} free, runs {self._runs}, owned {self._owned}")
