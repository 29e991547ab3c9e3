"""What tests of several folders share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: several thread pools on a few busy cores mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A slow machine is no counterexample: pytest's own timeout bounds a test.
settings.register_profile("sangam", deadline=None, suppress_health_check=[HealthCheck.too_slow])
if settings.get_current_profile_name() == "default":
    settings.load_profile("sangam")

# Outputs of the public reference code; not part of this repository (see its own README).
GOLDEN = Path(os.environ.get("SANGAM_GOLDEN", Path(__file__).parents[2] / "shared" / "golden"))


@pytest.fixture(scope="session")
def golden() -> Path:
    if not (GOLDEN / "MANIFEST.json").exists():
        pytest.skip(f"no reference outputs at {GOLDEN}; set SANGAM_GOLDEN")
    return GOLDEN
