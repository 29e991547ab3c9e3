from __future__ import annotations

import pytest

from backend.core.page_pool import PagePool
from backend.core.prefill_queue import PrefillQueue, allocate, register, release
from backend.core.request import RequestStatus
from backend.core.sampling_params import InvalidRequestError
from tests.backend.core.fake_steps import make, names


def test_requests_wait_in_order_of_their_arrival_then_of_coming_here() -> None:
    queue = PrefillQueue()
    for name, prompt, arrival in (("c", 3, 2.0), ("a", 1, 1.0), ("d", 4, 2.0), ("b", 2, 1.0)):
        queue.add(make(name, prompt, arrival=arrival))
    assert (queue.sizes, queue.num_tokens, len(queue)) == ([5, 6, 7, 8], 26, 4)
    queue.discard(queue[1])
    queue.discard(make("b"))  # a stranger
    assert (queue.sizes, queue.num_tokens) == ([5, 7, 8], 20)
    taken = queue.take(2)
    assert names(taken) == ["a", "c"] and {r.status for r in taken} == {RequestStatus.PREFILLING}
    assert (names([queue[0]]), queue.sizes, queue.num_tokens) == (["d"], [8], 8)
    assert queue.take(0) == []


def test_pages_are_given_whole_or_not_at_all_and_taken_back_once() -> None:
    pool = PagePool(7, 4)
    first, second = make("a"), make("b")
    assert allocate(pool, first) and len(first.pages) == 4
    assert not allocate(pool, second) and second.pages == [] and pool.num_free == 3
    for _ in range(2):
        release(pool, first)
    assert first.pages == [] and allocate(pool, second)
    pool.check()


def test_a_sequence_that_can_never_fit_is_refused_with_the_numbers() -> None:
    pool, requests = PagePool(4, 4), {}
    fits = make("a", 12)
    register(requests, pool, fits)
    with pytest.raises(InvalidRequestError, match=r"prompt \(13\) \+ canvas \(4\) = 17 tokens .* 16 tokens"):
        register(requests, pool, make("b", 13))
    with pytest.raises(ValueError, match="already"):
        register(requests, pool, make("a", 12))
    assert requests == {"a": fits}
