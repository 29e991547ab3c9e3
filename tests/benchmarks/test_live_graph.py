from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.live_graph import GraphFailed, LiveGraph, parse_table

PRINTED = """\
✓ model demo_model answers 6.0 s
process             its /health and /metrics
frontend            http://127.0.0.1:18123  
router              http://127.0.0.1:32277  
colocated_worker.0  http://127.0.0.1:21948  
logs in /somewhere

demo_model answers at http://127.0.0.1:18123/v1
curl http://127.0.0.1:18123/v1/chat/completions -H 'Content-Type: application/json' -d '{"model": "demo_model"}'
"""  # noqa: W291


def test_status_pages_are_read_from_what_serve_prints() -> None:
    assert parse_table(PRINTED) == {
        "frontend": "http://127.0.0.1:18123",
        "router": "http://127.0.0.1:32277",
        "colocated_worker.0": "http://127.0.0.1:21948",
    }


def test_a_graph_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(GraphFailed, match="no model in"):
        with LiveGraph(["colocated", f"--model={tmp_path / 'nothing'}"], tmp_path):
            pass
