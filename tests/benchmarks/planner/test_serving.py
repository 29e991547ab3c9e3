from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner.serving import text
from benchmarks.planner.space import graph_of
from benchmarks.simulator.config import SimulatorConfig, calibrated
from components.config import ColocatedWorkerConfig, PrefillWorkerConfig, RouterConfig
from graphs.__main__ import GRAPHS
from graphs.launch import Settings

HYBRID = calibrated("llada-8b", "sharegpt", num_prefill=5, num_colocated=3, token_budget=512, overflow_threshold=4096)
CONFIGS = [
    HYBRID,
    replace(HYBRID, overflow_threshold=math.inf),
    calibrated("dream-7b", "arxiv", gpu="a100", num_colocated=8, max_num_seqs=32),
]


@pytest.mark.parametrize("config", CONFIGS, ids=graph_of)
def test_sangam_serve_reads_what_was_simulated(config: SimulatorConfig, tmp_path: Path) -> None:
    graph = graph_of(config)
    path = tmp_path / f"{graph}.yaml"
    path.write_text(text(config, "why", canvas_length=512, peak_tokens=400_000))
    settings = Settings(GRAPHS[graph], path, {})
    router, colocated = settings.sections["router"], settings.sections["colocated_worker"]
    assert isinstance(router, RouterConfig) and isinstance(colocated, ColocatedWorkerConfig)
    assert router.overflow_threshold == config.overflow_threshold
    assert (router.default_canvas_length, router.max_queued_tokens) == (512, 600_000)
    assert colocated.num_workers == config.num_colocated
    assert (colocated.token_budget, colocated.max_num_seqs) == (config.token_budget, config.max_num_seqs)
    assert colocated.kv_cache_tokens == config.num_pages * config.page_size
    assert (colocated.dtype, colocated.device) == ("bfloat16", "cuda")
    if config.num_prefill:
        prefill = settings.sections["prefill_worker"]
        assert isinstance(prefill, PrefillWorkerConfig)
        assert (prefill.num_workers, prefill.max_prefill_tokens) == (config.num_prefill, config.max_prefill_tokens)
        assert (prefill.page_size, prefill.kv_cache_tokens) == (colocated.page_size, colocated.kv_cache_tokens)
    else:
        assert "prefill_worker" not in path.read_text()


def test_little_in_flight_leaves_the_routers_default() -> None:
    written = text(HYBRID, "why", canvas_length=None, peak_tokens=1000)
    assert "max_queued_tokens: 262144" in written and "default_canvas_length" not in written
    assert written.startswith("# why\n# sangam serve hybrid -f hybrid.yaml --model DIR\n")
