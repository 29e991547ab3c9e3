"""Disaggregated serving: the hybrid graph's processes, but prefills never overflow (its theta is infinite)."""

from __future__ import annotations

from graphs.graph import Graph
from graphs.hybrid import HYBRID

DISAGGREGATED = Graph("disaggregated", HYBRID.stages, may_overflow=False)
