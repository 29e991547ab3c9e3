"""Blocks that wait for their prefill at one worker, in order of request arrival."""

from __future__ import annotations

import itertools
from bisect import bisect

from backend.core.page_pool import PagePool
from backend.core.request import Request, RequestStatus
from backend.core.sampling_params import InvalidRequestError

_tenancies = itertools.count()


class PrefillQueue:
    """An old request's refresh goes ahead of a new request's arrival.

    And one in the middle of a block, which keeps its pages, goes ahead of all that have none: these may
    wait for its pages, and then nobody would ever move.

    Attributes:
        sizes: tokens of each waiting prefill, in the queue's order.
        num_tokens: their sum.
    """

    def __init__(self) -> None:
        self._keys: list[tuple[bool, float, int]] = []
        self._requests: list[Request] = []
        self.sizes: list[int] = []
        self.num_tokens = 0
        self._added = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def add(self, request: Request) -> None:
        self._added += 1
        key = (not request.pages, request.arrival_time, self._added)
        at = bisect(self._keys, key)
        size = request.sequence_length
        self._keys.insert(at, key)
        self._requests.insert(at, request)
        self.sizes.insert(at, size)
        self.num_tokens += size

    def take(self, count: int) -> list[Request]:
        """Removes the first `count`, which start their prefill."""
        taken = self._requests[:count]
        self.num_tokens -= sum(self.sizes[:count])
        del self._keys[:count], self._requests[:count], self.sizes[:count]
        for request in taken:
            request.transition(RequestStatus.PREFILLING)
        return taken

    def discard(self, request: Request) -> None:
        """Removes a request if it waits here."""
        at = next((i for i, waiting in enumerate(self._requests) if waiting is request), None)
        if at is not None:
            self.num_tokens -= self.sizes[at]
            del self._keys[at], self._requests[at], self.sizes[at]


def allocate(pool: PagePool, request: Request) -> bool:
    """Gives a request the pages of its sequence, if so many are free."""
    # Not the request's id: those who had it before may not have given back all they held.
    owner = (request.request_id, next(_tenancies))
    pages = pool.allocate(owner, pool.pages_for(request.sequence_length))
    if pages is None:
        return False
    request.pages, request.owner = pages, owner
    return True


def release(pool: PagePool, request: Request) -> None:
    """Takes back what a request holds, if anything."""
    if request.pages:
        pool.release(request.owner)
        request.pages = []


def register(requests: dict[str, Request], pool: PagePool, request: Request) -> None:
    """Makes a request one of a scheduler's.

    Raises:
        InvalidRequestError: its sequence can never fit the pool.
        ValueError: a request of this id is there already.
    """
    if request.request_id in requests:
        raise ValueError(f"request {request.request_id} is already scheduled here")
    needed, capacity = pool.pages_for(request.sequence_length), pool.num_pages
    if needed > capacity:
        raise InvalidRequestError(
            f"prompt ({len(request.prompt)}) + canvas ({request.params.canvas_length}) = "
            f"{request.sequence_length} tokens do not fit the KV cache of {capacity * pool.page_size} tokens"
        )
    requests[request.request_id] = request
