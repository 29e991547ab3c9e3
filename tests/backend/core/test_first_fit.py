from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from backend.core.first_fit import FirstFit

Key = tuple[int, int]
ACTIONS = st.lists(st.tuples(st.sampled_from("aarrs"), st.integers(0, 10**6), st.integers(0, 9)), max_size=400)
QUERIES = st.lists(st.tuples(st.integers(-1, 10), st.sampled_from((inf, 0, 5, 20))), min_size=1, max_size=3)


def naive_first(items: dict[Key, int], size: int, below: float) -> Key | None:
    found = min((key for key, held in items.items() if held >= size), default=None)
    return found if found is not None and found[0] < below else None


def naive_largest(items: dict[Key, int]) -> Key | None:
    return min(items, key=lambda key: (-items[key], key), default=None)


@given(st.integers(0, 200), ACTIONS, QUERIES)
def test_finds_what_a_walk_over_all_items_finds(
    num_first: int, actions: list[tuple[str, int, int]], queries: list[tuple[int, float]]
) -> None:
    fit: FirstFit[Key] = FirstFit()
    items: dict[Key, int] = {}
    for number in range(num_first):  # enough for several chunks
        items[number * 7919 % 40, number] = number % 3
        fit.add((number * 7919 % 40, number), number % 3)
    for what, choice, size in actions:
        keys = sorted(items)
        key = keys[choice % len(keys)] if keys else None
        if what == "a":
            key = (choice % 40, len(items) + choice)
            if key not in items:
                items[key] = size
                fit.add(key, size)
        elif what == "r" and key is not None:
            del items[key]
            fit.remove(key)
        elif what == "s" and key is not None:
            items[key] = size
            fit.resize(key, size)
        for wanted, below in queries:
            assert fit.first(wanted, below) == naive_first(items, wanted, below)
        assert fit.largest() == naive_largest(items)
        assert len(fit) == len(items)
    assert list(fit) == sorted(items)


def test_draining_a_long_list_leaves_nothing_behind() -> None:
    fit: FirstFit[Key] = FirstFit()
    for number in range(1000):
        fit.add((number, 0), -number)
    for number in range(1000):
        assert fit.first(-number) == (number, 0)
        fit.remove((number, 0))
    assert (len(fit), list(fit), fit.first(-1000), fit.largest()) == (0, [], None, None)


def test_a_large_item_at_the_end_of_a_long_list_is_found() -> None:
    fit: FirstFit[Key] = FirstFit()
    for number in range(1000):
        fit.add((number, 0), number)
        assert fit.largest() == fit.first(number) == (number, 0)
