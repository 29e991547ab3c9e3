from __future__ import annotations

import pytest

from benchmarks.micro.routing import REGIMES, measure


@pytest.mark.parametrize("name", REGIMES)
def test_each_regime_is_what_it_is_called(name: str) -> None:
    figures = measure(REGIMES[name], num_workers=8, num_in_flight=400, num_placements=200)
    assert figures.placements_per_s > 0
    assert (0.2 < figures.overflow_share < 0.9) == (name == "overflow")
    assert (figures.num_queued > 50) == (figures.num_pending > 20) == (name == "saturated")
