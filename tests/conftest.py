"""What tests of several folders share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported: several thread pools on a few busy cores mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Outputs of the public reference code; not part of this repository (see its own README).
GOLDEN = Path(os.environ.get("SANGAM_GOLDEN", Path(__file__).parents[2] / "shared" / "golden"))


@pytest.fixture(scope="session")
def golden() -> Path:
    if not (GOLDEN / "MANIFEST.json").exists():
        pytest.skip(f"no reference outputs at {GOLDEN}; set SANGAM_GOLDEN")
    return GOLDEN
