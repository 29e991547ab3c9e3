"""What the source of KV lets its peers know of its pages, without being asked."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np


class PageStamps:
    """Two numbers per page in host memory that peers read, `stamps` and `progress`, int64 [num_pages] each.

    A page's stamp changes before the page is given to another. Who reads a page and afterwards finds
    the stamp unchanged has read what the stamp was taken of. A sequence's progress, kept with its first
    page, is how many layers of all its pages are complete.
    """

    RELEASED = -1

    def __init__(self, num_pages: int) -> None:
        # At random, so that a stamp from a former life of this worker, or of any other, never fits.
        self.stamps = np.random.default_rng().integers(2**62, size=num_pages, dtype=np.int64)
        self.progress = np.zeros(num_pages, dtype=np.int64)
        # A GPU's progress is written by the transfer's thread, all else by the engine's.
        self._lock = threading.Lock()

    def stamp(self, pages: Sequence[int]) -> int:
        return int(self.stamps[pages[0]])

    def invalidate(self, pages: Sequence[int]) -> None:
        with self._lock:
            self.stamps[list(pages)] += 1
            self.progress[pages[0]] = self.RELEASED  # who waits for the next layer need not wait any longer

    def set_progress(self, pages: Sequence[int], num_layers: int, stamp: int | None = None) -> None:
        """`stamp`: of the pages that are meant; given to another meanwhile, they are left alone."""
        with self._lock:
            if stamp is None or stamp == self.stamp(pages):
                self.progress[pages[0]] = num_layers
