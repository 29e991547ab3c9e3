import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.page_pool import PagePool, PagePoolError


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 12)), max_size=60))
def test_balances_after_any_mix_of_allocations_and_releases(
    num_pages: int, actions: list[tuple[bool, int, int]]
) -> None:
    pool = PagePool(num_pages, 16)
    held: dict[int, list[int]] = {}
    for allocate, owner, wanted in actions:
        if allocate and owner not in held:
            pages = pool.allocate(owner, wanted)
            assert (pages is None) == (wanted > num_pages - sum(map(len, held.values())))
            if pages is not None:
                assert len(pages) == wanted
                held[owner] = pages
        elif not allocate and owner in held:
            pool.release(owner)
            del held[owner]
        pool.check()
        assert pool.num_free == num_pages - sum(map(len, held.values()))
    for owner in held:
        pool.release(owner)
    pool.check()
    assert pool.allocate("all", num_pages) == list(range(num_pages))


def test_gives_neighbours_where_it_can() -> None:
    pool = PagePool(10, 16)
    for owner, pages in (("a", 2), ("b", 2), ("c", 2), ("d", 4)):
        pool.allocate(owner, pages)
    pool.release("a")
    pool.release("c")
    pool.release("d")
    assert pool.allocate("e", 5) == [4, 5, 6, 7, 8]
    assert pool.allocate("f", 3) == [0, 1, 9]


def test_misuse_is_refused() -> None:
    pool = PagePool(4, 16)
    pool.allocate("a", 1)
    with pytest.raises(PagePoolError, match="already holds"):
        pool.allocate("a", 1)
    pool.release("a")
    with pytest.raises(PagePoolError, match="holds no pages"):
        pool.release("a")
