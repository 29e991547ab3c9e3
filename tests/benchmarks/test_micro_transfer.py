from __future__ import annotations

import asyncio

from benchmarks.micro.transfer import Shape, measure


def test_a_toy_model_is_handed_over_both_ways() -> None:
    samples = asyncio.run(measure(Shape(layers=2, hidden=64, sequence=160), repeats=1))
    for taken in samples.values():
        (sample,) = taken
        assert sample.num_bytes == 2 * 2 * 160 * 64 * 4
        assert 0 < sample.prefill < sample.total and sample.transfer > 0
