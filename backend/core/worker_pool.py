"""The workers of one pool, sorted by load and by free memory, kept so as both change."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from backend.core.first_fit import FirstFit

WorkerId = int


class WorkerLoad:
    """The router's account of one worker: what is assigned there and not yet done.

    Attributes:
        outstanding_prefill_tokens: o_w, assigned and not yet run.
        num_prefills: the prefills that o_w sums up.
        num_requests: blocks placed there and not yet done.
        used_pages: pages of these blocks, from their placement on.
        promised_pages: pages kept free for pending decodes; may exceed what is free.
    """

    __slots__ = (
        "worker_id",
        "num_pages",
        "page_size",
        "outstanding_prefill_tokens",
        "num_prefills",
        "num_requests",
        "used_pages",
        "promised_pages",
        "pool",
    )

    def __init__(self, worker_id: WorkerId, num_pages: int, page_size: int) -> None:
        self.worker_id = worker_id
        self.num_pages = num_pages
        self.page_size = page_size
        self.outstanding_prefill_tokens = 0
        self.num_prefills = 0
        self.num_requests = 0
        self.used_pages = 0
        self.promised_pages = 0
        self.pool: WorkerPool | None = None
        """The pool that it may be chosen from; None while it gets no work (draining, suspect, lost)."""

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    @property
    def capacity_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def free_pages(self) -> int:
        return self.num_pages - self.used_pages

    @property
    def available_tokens(self) -> int:
        """What a new prefill may take: free and not promised; negative when more is promised than free."""
        return (self.num_pages - self.used_pages - self.promised_pages) * self.page_size

    def change(
        self, *, tokens: int = 0, prefills: int = 0, requests: int = 0, used: int = 0, promised: int = 0
    ) -> None:
        """Adds to the account, and moves the worker to its new place in its pool."""
        self.outstanding_prefill_tokens += tokens
        self.num_prefills += prefills
        self.num_requests += requests
        self.used_pages += used
        self.promised_pages += promised
        pool = self.pool
        if pool is not None:
            pool.num_prefills += prefills
            pool.move(self)


_Key = tuple[int, int, WorkerId]


class WorkerPool:
    """Workers that may be given work. A choice or a change costs little more in a larger pool."""

    def __init__(self) -> None:
        self._loads: dict[WorkerId, WorkerLoad] = {}
        self._keys: dict[WorkerId, _Key] = {}
        self._by_load: FirstFit[_Key] = FirstFit()  # o_w, requests, id; the size is what is available
        self._by_capacity: list[tuple[int, WorkerId]] = []
        self.num_prefills = 0
        """Prefills assigned to these workers and not yet run."""

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[WorkerLoad]:
        return iter(self._loads.values())

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits some worker when that is empty."""
        return self._by_capacity[-1][0] if self._by_capacity else 0

    def add(self, load: WorkerLoad) -> None:
        """Raises ValueError if it, or another worker of this id, is in a pool already."""
        if load.pool is not None or load.worker_id in self._loads:
            raise ValueError(f"worker {load.worker_id} is in a pool already")
        self._loads[load.worker_id] = load
        key = self._keys[load.worker_id] = _key(load)
        self._by_load.add(key, load.available_tokens)
        insort(self._by_capacity, (load.capacity_tokens, load.worker_id))
        self.num_prefills += load.num_prefills
        load.pool = self

    def remove(self, load: WorkerLoad) -> None:
        """The worker gets no more work; its account lives on with what it still has."""
        del self._loads[load.worker_id]
        self._by_load.remove(self._keys.pop(load.worker_id))
        del self._by_capacity[bisect_left(self._by_capacity, (load.capacity_tokens, load.worker_id))]
        self.num_prefills -= load.num_prefills
        load.pool = None

    def move(self, load: WorkerLoad) -> None:
        """Puts a worker of this pool where its account, which has changed, belongs."""
        key = _key(load)
        old = self._keys[load.worker_id]
        if key == old:
            self._by_load.resize(key, load.available_tokens)
        else:
            self._keys[load.worker_id] = key
            self._by_load.remove(old)
            self._by_load.add(key, load.available_tokens)

    def least_loaded(self, num_tokens: int, below: float) -> WorkerLoad | None:
        """The worker with the least o_w that is under `below` and has room for `num_tokens` now.

        Among equals the one with the fewest requests, then the lowest id: decodes spread too.
        """
        key = self._by_load.first(num_tokens, below)
        return self._loads[key[2]] if key is not None else None

    def least_loaded_ever(self, num_tokens: int) -> WorkerLoad | None:
        """As `least_loaded`, of all workers that can hold `num_tokens` when they are empty."""
        return next((load for load in self._in_order() if load.capacity_tokens >= num_tokens), None)

    def roomiest(self, num_tokens: int) -> WorkerLoad | None:
        """The worker with most memory free and not promised, of those that can hold `num_tokens` at all.

        Among equals the one with the least load.
        """
        key = self._by_load.largest()
        if key is None or self._loads[key[2]].capacity_tokens >= num_tokens:
            return self._loads[key[2]] if key is not None else None
        # Workers of several sizes, and a small one has most room: rare enough to look at all.
        loads = (load for load in self._in_order() if load.capacity_tokens >= num_tokens)
        return max(loads, key=lambda load: load.available_tokens, default=None)

    def _in_order(self) -> Iterator[WorkerLoad]:
        return (self._loads[worker_id] for _, _, worker_id in self._by_load)


def _key(load: WorkerLoad) -> _Key:
    return load.outstanding_prefill_tokens, load.num_requests, load.worker_id
