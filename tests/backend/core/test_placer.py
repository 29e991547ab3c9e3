from __future__ import annotations

from math import inf

import pytest

from backend.core.ledger import Dispatch
from backend.core.placer import Placer
from backend.core.routing import ColocatedPolicy, HybridPolicy, Policy, Prefill, Route, RouteKind
from backend.core.worker_pool import WorkerLoad

PAGE = 16
PREFILL, COLOCATED, DECODE = RouteKind.PREFILL, RouteKind.COLOCATED, RouteKind.DECODE


class Scene:
    """A placer, its workers, and what it has assigned since somebody last looked."""

    def __init__(self, policy: Policy, prefill: dict[int, int], colocated: dict[int, int]) -> None:
        self.placer = Placer(policy, lambda dispatch, route: self._assigned.append((dispatch, route)))
        self._assigned: list[tuple[Dispatch, Route]] = []
        self.workers: dict[int, WorkerLoad] = {}
        for worker_id, pages in prefill.items():
            self.workers[worker_id] = WorkerLoad(worker_id, pages, PAGE)
            self.placer.show(self.workers[worker_id], self.placer.prefill_pool)
        for worker_id, pages in colocated.items():
            self.workers[worker_id] = WorkerLoad(worker_id, pages, PAGE)
            self.placer.show(self.workers[worker_id], self.placer.colocated_pool)

    def submit(self, name: str, pages: int, arrival: float = 0.0) -> None:
        self.placer.submit((name, 0, 1), Prefill(pages * PAGE, arrival_time=arrival))

    def prefilled(self, name: str) -> None:
        self.placer.prefilled((name, 0, 1))

    def hand_over(self, name: str) -> None:
        self.placer.hand_over((name, 0, 1))

    def source_freed(self, name: str) -> None:
        self.placer.source_freed((name, 0, 1))

    def done(self, name: str) -> None:
        self.placer.done((name, 0, 1))

    def assigned(self) -> list[tuple[str, RouteKind, int]]:
        found = [(dispatch[0], route.kind, route.load.worker_id) for dispatch, route in self._assigned]
        self._assigned.clear()
        return found

    def promised(self) -> dict[int, int]:
        return {i: load.promised_pages for i, load in self.workers.items() if load.promised_pages}


def disaggregated(prefill: dict[int, int], colocated: dict[int, int]) -> Scene:
    return Scene(HybridPolicy(inf), prefill, colocated)


def test_a_block_goes_from_the_prefill_worker_to_the_roomiest_colocated_one() -> None:
    scene = disaggregated({1: 10}, {8: 9, 9: 10})
    scene.submit("a", 5)
    assert scene.assigned() == [("a", PREFILL, 1)]
    scene.hand_over("a")
    assert scene.assigned() == [("a", DECODE, 9)]
    scene.source_freed("a")
    scene.done("a")
    assert [load.used_pages for load in scene.workers.values()] == [0, 0, 0]


def test_a_falling_o_w_of_a_prefill_worker_lets_the_head_of_the_queue_go() -> None:
    scene = Scene(HybridPolicy(5 * PAGE), {1: 100}, {9: 5})
    for name in "abcd":
        scene.submit(name, 5)
    assert scene.assigned() == [("a", PREFILL, 1), ("b", COLOCATED, 9)]
    assert scene.placer.num_queued == 2
    scene.prefilled("a")
    assert scene.assigned() == [("c", PREFILL, 1)]
    scene.source_freed("c")  # the forward has run, too
    assert scene.assigned() == [("d", PREFILL, 1)]
    assert scene.placer.num_overflows == 1


def test_the_head_of_the_queue_blocks_those_behind_it() -> None:
    scene = disaggregated({1: 10}, {9: 10})
    for name, pages in (("a", 6), ("b", 6), ("c", 1)):
        scene.submit(name, pages)
    assert scene.assigned() == [("a", PREFILL, 1)]
    scene.done("b")
    assert scene.assigned() == [("c", PREFILL, 1)]


def test_memory_is_promised_to_a_pending_decode_before_a_prefill_may_overflow_into_it() -> None:
    scene = Scene(HybridPolicy(PAGE), {1: 10}, {9: 10})
    scene.submit("a", 6)
    scene.submit("b", 6)
    assert scene.assigned() == [("a", PREFILL, 1), ("b", COLOCATED, 9)]
    scene.hand_over("a")
    assert scene.promised() == {9: 6}
    scene.submit("c", 4)
    assert scene.assigned() == [("c", PREFILL, 1)]
    scene.submit("d", 4)
    assert scene.assigned() == []  # 4 pages of worker 9 are free, but not to take
    scene.done("b")
    assert scene.assigned() == [("a", DECODE, 9), ("d", COLOCATED, 9)]


def test_a_pending_decode_has_the_memory_before_the_queue_that_its_own_prefill_unblocks() -> None:
    scene = Scene(HybridPolicy(PAGE), {1: 100}, {9: 10})
    for name in "abcd":
        scene.submit(name, 5)
    assert scene.assigned() == [("a", PREFILL, 1), ("b", COLOCATED, 9)]
    scene.prefilled("b")
    assert scene.assigned() == [("c", COLOCATED, 9)]
    scene.done("b")
    assert scene.assigned() == []  # c is over the threshold of worker 9
    scene.prefilled("c")
    assert scene.assigned() == [("d", COLOCATED, 9)]
    scene.done("c")
    scene.submit("e", 1)
    scene.submit("f", 5)
    assert scene.assigned() == []
    scene.hand_over("a")
    assert scene.assigned() == [("a", DECODE, 9), ("e", PREFILL, 1)]


def test_pending_decodes_go_in_order_of_their_requests_arrival() -> None:
    scene = disaggregated({1: 100}, {9: 10})
    for name, arrival in (("x", 0.0), ("late", 3.0), ("early", 1.0), ("middle", 2.0)):
        scene.submit(name, 6, arrival)
        scene.hand_over(name)
    assert scene.assigned()[-1] == ("middle", PREFILL, 1)
    for gone, follows in (("x", "early"), ("early", "middle"), ("middle", "late")):
        scene.done(gone)
        assert scene.assigned() == [(follows, DECODE, 9)]
    assert scene.promised() == {}


def test_a_pending_decode_goes_where_room_comes_up_first() -> None:
    scene = disaggregated({1: 100}, {8: 10, 9: 11})
    for name in ("x", "y", "a"):
        scene.submit(name, 10)
        scene.hand_over(name)
    assert [a for a in scene.assigned() if a[1] is DECODE] == [("x", DECODE, 9), ("y", DECODE, 8)]
    assert scene.promised() == {9: 10}
    scene.done("y")
    assert scene.assigned() == [("a", DECODE, 8)]
    assert scene.promised() == {}


def test_room_that_is_too_small_for_the_first_pending_decode_goes_to_a_later_one() -> None:
    scene = disaggregated({1: 100}, {8: 10, 9: 12})
    for name, pages in (("x", 6), ("z", 10), ("y", 6), ("own", 6), ("large", 11)):
        scene.submit(name, pages)
        scene.hand_over(name)
    scene.done("y")
    scene.submit("small", 4)
    scene.hand_over("small")
    scene.assigned()
    assert scene.promised() == {8: 6, 9: 15}
    scene.done("z")
    assert scene.assigned() == [("own", DECODE, 8), ("small", DECODE, 8)]


def test_an_earlier_request_takes_the_free_part_of_what_is_promised_to_later_ones() -> None:
    scene = disaggregated({1: 100}, {9: 10})
    for name, pages, arrival in (("x", 6, 1.0), ("later", 8, 3.0), ("earlier", 4, 2.0)):
        scene.submit(name, pages, arrival)
        scene.hand_over(name)
    assert scene.assigned()[-1] == ("earlier", DECODE, 9)
    assert scene.promised() == {9: 8}


def test_a_promise_that_is_no_longer_needed_lets_the_next_one_of_that_worker_go() -> None:
    """The first in turn leaves for another worker; what is free is enough for the one behind it."""
    scene = disaggregated({1: 100}, {8: 21, 9: 12})
    for name, pages in (("z", 21), ("x", 6), ("y", 6), ("own", 11), ("first", 10), ("second", 6)):
        scene.submit(name, pages)
        scene.hand_over(name)
    scene.done("y")
    scene.assigned()
    assert scene.promised() == {8: 11, 9: 16}
    scene.done("z")
    assert scene.assigned() == [("own", DECODE, 8), ("first", DECODE, 8), ("second", DECODE, 9)]


def test_promises_of_a_worker_that_is_hidden_move_on() -> None:
    scene = disaggregated({1: 100}, {8: 10, 9: 11})
    for name in ("x", "y", "a", "b"):
        scene.submit(name, 8)
        scene.hand_over(name)
    scene.assigned()
    assert scene.promised() == {8: 8, 9: 8}
    scene.placer.hide(scene.workers[9])
    assert scene.promised() == {8: 16}
    scene.placer.hide(scene.workers[9])
    scene.done("y")
    assert scene.assigned() == [("a", DECODE, 8)]
    scene.placer.show(scene.workers[9], scene.placer.colocated_pool)
    assert scene.assigned() == []  # x is still there
    scene.done("x")
    assert scene.assigned() == [("b", DECODE, 9)]


def test_what_nobody_can_hold_at_present_waits_aside_and_comes_back() -> None:
    scene = disaggregated({1: 100}, {9: 10})
    scene.submit("huge", 20)
    scene.submit("a", 5)
    assert scene.assigned() == [("a", PREFILL, 1)]
    assert scene.placer.is_stranded(("huge", 0, 1)) and scene.placer.num_queued == 1
    big = WorkerLoad(7, 20, PAGE)
    scene.placer.show(big, scene.placer.colocated_pool)
    assert scene.assigned() == [("huge", PREFILL, 1)]
    scene.placer.hide(big)
    scene.hand_over("huge")
    assert scene.placer.is_stranded(("huge", 0, 1)) and scene.placer.num_pending_decodes == 1
    scene.placer.show(big, scene.placer.colocated_pool)
    assert scene.assigned() == [("huge", DECODE, 7)]
    assert not scene.placer.is_stranded(("huge", 0, 1))


def test_nothing_is_prefilled_while_nobody_could_denoise_it() -> None:
    scene = disaggregated({1: 100}, {})
    scene.submit("a", 5)
    scene.submit("b", 5)
    assert scene.assigned() == [] and scene.placer.num_queued == 2
    scene.placer.show(WorkerLoad(9, 10, PAGE), scene.placer.colocated_pool)
    assert scene.assigned() == [("a", PREFILL, 1), ("b", PREFILL, 1)]


def test_when_the_last_prefill_worker_goes_it_is_colocated_serving() -> None:
    scene = disaggregated({1: 5}, {9: 10})
    for name in "abc":
        scene.submit(name, 5)
    scene.placer.hide(scene.workers[1])
    assert scene.assigned() == [("a", PREFILL, 1), ("b", COLOCATED, 9), ("c", COLOCATED, 9)]
    scene.hand_over("a")
    assert scene.promised() == {9: 5}
    scene.placer.show(scene.workers[1], scene.placer.prefill_pool)
    scene.submit("d", 5)
    assert scene.assigned() == []


def test_a_worker_that_gets_prefills_without_regard_to_its_memory_gets_the_decodes_it_promised_pages_first() -> None:
    """Otherwise a pending decode could wait for ever on a worker whose account is never free again."""
    scene = disaggregated({1: 20}, {8: 10, 9: 10})
    for name in ("x", "y", "pending", "another"):
        scene.submit(name, 8)
        scene.hand_over(name)
        scene.source_freed(name)
    scene.assigned()
    assert scene.promised() == {8: 8, 9: 8}
    scene.placer.hide(scene.workers[1])
    scene.submit("a", 8)
    assert scene.assigned() == [("pending", DECODE, 8), ("a", COLOCATED, 8)]
    assert scene.promised() == {9: 8}
    scene.submit("b", 8)
    assert scene.assigned() == [("another", DECODE, 9), ("b", COLOCATED, 9)]


def test_news_of_strangers_and_news_twice_change_nothing() -> None:
    scene = disaggregated({1: 10}, {9: 10})
    scene.submit("a", 6)
    scene.submit("waiting", 6)
    scene.assigned()
    for name in ("stranger", "waiting"):
        for tell in (scene.prefilled, scene.hand_over, scene.source_freed):
            tell(name)
    scene.done("stranger")
    assert scene.assigned() == [] and scene.placer.num_queued == 1
    for _ in range(3):
        scene.hand_over("a")
    assert scene.assigned() == [("a", DECODE, 9)]
    for _ in range(3):
        scene.hand_over("a")
        scene.prefilled("a")
    assert scene.assigned() == [] and scene.placer.num_pending_decodes == 0
    for _ in range(3):
        scene.source_freed("a")
    assert scene.assigned() == [("waiting", PREFILL, 1)]
    for _ in range(3):
        scene.done("a")
        scene.hand_over("a")
    assert scene.assigned() == []
    assert [load.used_pages for load in scene.workers.values()] == [6, 0]


def test_a_block_that_is_denoised_where_it_was_prefilled_cannot_be_handed_over() -> None:
    scene = Scene(ColocatedPolicy(), {}, {9: 10})
    scene.submit("a", 6)
    scene.hand_over("a")
    assert scene.assigned() == [("a", COLOCATED, 9)] and scene.placer.num_pending_decodes == 0


def test_a_block_may_be_handed_over_before_its_prefill_has_run_if_there_is_room() -> None:
    scene = Scene(HybridPolicy(PAGE), {1: 10}, {9: 6})
    scene.submit("a", 5)
    assert scene.placer.hand_over_early(("a", 0, 1)) and not scene.placer.hand_over_early(("a", 0, 1))
    assert scene.assigned() == [("a", PREFILL, 1), ("a", DECODE, 9)]
    scene.submit("b", 5)
    assert scene.assigned() == []  # worker 1 has the first one to run yet
    scene.hand_over("a")
    assert scene.assigned() == [("b", PREFILL, 1)]
    assert not scene.placer.hand_over_early(("b", 0, 1))
    scene.hand_over("b")
    assert scene.assigned() == [] and scene.promised() == {9: 5}


def test_an_attempt_is_submitted_once() -> None:
    scene = disaggregated({1: 10}, {9: 10})
    for name, pages in (("assigned", 6), ("queued", 6), ("stranded", 11)):
        scene.submit(name, pages)
        with pytest.raises(ValueError, match="here already"):
            scene.submit(name, pages)
