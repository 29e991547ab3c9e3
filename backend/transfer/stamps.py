"""What tells a peer that the pages it has read were still the ones it was sent for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class PageStamps:
    """One number per page, in host memory that peers read: `stamps` int64 [num_pages].

    A page's stamp changes before the page is given to another. Who reads a page and afterwards finds
    the stamp unchanged has read what the stamp was taken of. Written by one thread at a time.
    """

    def __init__(self, num_pages: int) -> None:
        # At random, so that a stamp from a former life of this worker, or of any other, never fits.
        self.stamps = np.random.default_rng().integers(2**62, size=num_pages, dtype=np.int64)

    def stamp(self, pages: Sequence[int]) -> int:
        return int(self.stamps[pages[0]])

    def invalidate(self, pages: Sequence[int]) -> None:
        self.stamps[list(pages)] += 1
