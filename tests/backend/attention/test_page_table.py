from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backend.attention.kv_cache import PagedSequence
from backend.attention.page_table import PageTable
from tests.backend.attention.batches import new_cache

CACHE = new_cache(num_pages=40, page_size=8, kv_heads=1, head_dim=2)
LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=5)


def paged(lengths: list[int], seed: int) -> list[PagedSequence]:
    rng = np.random.default_rng(seed)
    # Longer than needed, as a pool that rounds up would give them.
    return [PagedSequence(CACHE, rng.integers(40, size=12).tolist(), length) for length in lengths]


def naive(sequences: list[PagedSequence], query_lengths: list[int]) -> dict[int, tuple[list[int], list[int]]]:
    """Row -> its query rows and the slots of its tokens, from first principles."""
    expected, rows = {}, 0
    for i, (sequence, count) in enumerate(zip(sequences, query_lengths, strict=True)):
        slots = [int(sequence.pages[at // 8]) * 8 + at % 8 for at in range(sequence.length)]
        expected[i] = (list(range(rows, rows + count)), slots)
        rows += count
    return expected


def read(table: PageTable) -> dict[int, tuple[list[int], list[int]]]:
    """The same from the table, the way FlashInfer reads it."""
    found = {}
    for i in range(table.num_sequences):
        rows = range(int(table.query_starts[i]), int(table.query_starts[i + 1]))
        pages = table.pages[table.page_starts[i] : table.page_starts[i + 1]].tolist()
        length = (len(pages) - 1) * 8 + int(table.last_page_lengths[i])
        found[i] = (list(rows), [pages[at // 8] * 8 + at % 8 for at in range(length)])
    return found


@given(LENGTHS, LENGTHS, st.integers(0, 1000))
def test_equal_to_a_naive_one_and_nothing_stays_of_the_last(
    before: list[tuple[int, int]], after: list[tuple[int, int]], seed: int
) -> None:
    table = PageTable(5, 60, is_pinned=False)
    for batch in (before, after):
        lengths, queries = [length for length, _ in batch], [query for _, query in batch]
        sequences = paged(lengths, seed)
        table.fill(queries, sequences)
        assert read(table) == naive(sequences, queries)


@given(LENGTHS, st.data())
def test_a_row_can_be_replaced_by_one_of_the_same_size_alone(batch: list[tuple[int, int]], data: st.DataObject) -> None:
    lengths, queries = [length for length, _ in batch], [query for _, query in batch]
    sequences = paged(lengths, 1)
    table = PageTable(5, 60, is_pinned=False)
    table.fill(queries, sequences)
    row = data.draw(st.integers(0, len(batch) - 1))
    other = paged([data.draw(st.one_of(st.just(lengths[row]), st.integers(1, 60)))], 2)[0]
    replaced = table.replace(row, other)
    if other.length == lengths[row]:
        sequences[row] = other
        assert replaced is not None and table.pages[replaced].tolist() == other.pages.tolist()
    else:
        assert replaced is None
    assert read(table) == naive(sequences, queries)
