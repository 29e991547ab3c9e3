"""A sorted list that finds the first of its items that is big enough, without walking over the others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from math import inf
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=tuple[Any, ...])

_CHUNK = 64
"""A chunk that is longer is split, unless there are more chunks; a quarter of it is joined to a neighbour."""


class FirstFit(Generic[Key]):
    """Keys in order, each with a size; no two keys are equal.

    Kept in chunks, each with a bound on its sizes: a search skips whole chunks.
    """

    def __init__(self) -> None:
        self._chunks: list[list[Key]] = []
        self._sizes: list[list[int]] = []
        self._lasts: list[Key] = []
        """The last key of each chunk."""
        self._bounds: list[int] = []
        """No size in the chunk is larger; the largest may be smaller since a removal."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Key]:
        for chunk in self._chunks:
            yield from chunk

    def first(self, size: int, below: float = inf) -> Key | None:
        """The first key whose size is at least `size`, if its first element is less than `below`."""
        if not self._chunks or self._chunks[0][0][0] >= below or max(self._bounds) < size:
            return None
        for i, bound in enumerate(self._bounds):
            if bound >= size:
                chunk, sizes = self._chunks[i], self._sizes[i]
                if chunk[0][0] >= below:
                    return None
                for j, candidate in enumerate(sizes):
                    if candidate >= size:
                        return chunk[j] if chunk[j][0] < below else None
                self._bounds[i] = max(sizes)
        return None

    def largest(self) -> Key | None:
        """The first of the keys whose size no other exceeds."""
        while self._bounds:
            bound = max(self._bounds)
            i = self._bounds.index(bound)
            sizes = self._sizes[i]
            size = max(sizes)
            if size == bound:
                return self._chunks[i][sizes.index(size)]
            self._bounds[i] = size
        return None

    def add(self, key: Key, size: int) -> None:
        self._length += 1
        if not self._chunks:
            self._chunks, self._sizes, self._lasts, self._bounds = [[key]], [[size]], [key], [size]
            return
        i = bisect_left(self._lasts, key)
        if i == len(self._lasts):
            i -= 1
            self._lasts[i] = key
        chunk = self._chunks[i]
        at = bisect_left(chunk, key)
        chunk.insert(at, key)
        self._sizes[i].insert(at, size)
        if size > self._bounds[i]:
            self._bounds[i] = size
        if len(chunk) > max(_CHUNK, len(self._chunks)):
            self._split(i)

    def remove(self, key: Key) -> None:
        """Removes a key that is here."""
        self._length -= 1
        i = bisect_left(self._lasts, key)
        chunk = self._chunks[i]
        at = bisect_left(chunk, key)
        del chunk[at], self._sizes[i][at]
        if not chunk:
            del self._chunks[i], self._sizes[i], self._lasts[i], self._bounds[i]
            return
        if at == len(chunk):
            self._lasts[i] = chunk[-1]
        if len(chunk) < _CHUNK // 4 and len(self._chunks) > 1:
            self._join(i if i + 1 < len(self._chunks) else i - 1)

    def resize(self, key: Key, size: int) -> None:
        """Changes the size of a key that is here."""
        i = bisect_left(self._lasts, key)
        self._sizes[i][bisect_left(self._chunks[i], key)] = size
        if size > self._bounds[i]:
            self._bounds[i] = size

    def _split(self, i: int) -> None:
        chunk, sizes = self._chunks[i], self._sizes[i]
        middle = len(chunk) // 2
        self._chunks[i : i + 1] = [chunk[:middle], chunk[middle:]]
        self._sizes[i : i + 1] = [sizes[:middle], sizes[middle:]]
        self._lasts.insert(i, chunk[middle - 1])
        self._bounds[i : i + 1] = [max(sizes[:middle]), max(sizes[middle:])]

    def _join(self, i: int) -> None:
        """Joins a chunk and the one after it."""
        self._chunks[i] += self._chunks.pop(i + 1)
        self._sizes[i] += self._sizes.pop(i + 1)
        self._bounds[i] = max(self._bounds[i], self._bounds.pop(i + 1))
        del self._lasts[i]
        if len(self._chunks[i]) > max(_CHUNK, len(self._chunks)):
            self._split(i)
