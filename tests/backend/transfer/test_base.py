from __future__ import annotations

import torch

from backend.attention.kv_cache import KVCache
from backend.transfer.base import KVLayout, KVSource


def source() -> KVSource:
    cache = KVCache(2, 5, 16, 3, 8, torch.bfloat16, torch.device("cpu"))
    layout = KVLayout.of(cache, "model")
    assert layout.page_bytes == cache.data[0, 0, 0].nbytes
    return KVSource("worker", layout, 5, "cpu", 0, b"\x00\xff", 2**63 + 5, 2**62, 1)


def test_a_source_survives_the_wire() -> None:
    wire = source().to_wire()
    assert KVSource.from_wire(wire) == source()
    assert {type(value) for value in (*wire.values(), *wire["layout"].values())} == {str, int, bytes, dict}


def test_workers_may_differ_in_their_number_of_pages() -> None:
    few, many = (KVCache(2, n, 16, 3, 8, torch.float32, torch.device("cpu")) for n in (5, 50))
    assert KVLayout.of(few, "model") == KVLayout.of(many, "model")
