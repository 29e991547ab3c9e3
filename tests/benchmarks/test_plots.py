from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks import plots  # noqa: E402
from tests.benchmarks.canned import SWEEP  # noqa: E402


def test_a_sweep_is_drawn_small(tmp_path: Path) -> None:
    plots.latencies(SWEEP, tmp_path / "latency.png")
    written = (tmp_path / "latency.png").read_bytes()
    assert written.startswith(b"\x89PNG")
    assert len(written) < 150_000
