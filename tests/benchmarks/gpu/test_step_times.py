from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backend.core.scheduler import SchedulerConfig
from backend.engine.engine import Engine, EngineConfig
from benchmarks.gpu.serving import jobs, serve
from benchmarks.gpu.shapes import random_model
from benchmarks.gpu.step_times import decode_time


@pytest.fixture
def engine() -> Engine:
    model = random_model("toy-llada", torch.float32, torch.device("cpu"))
    config = EngineConfig(Path("toy"), SchedulerConfig(256, 4), kv_cache_tokens=1024, async_scheduling=True)
    return Engine.of(model, config)


def test_a_model_that_fails_is_told_and_nothing_of_it_stays(engine: Engine) -> None:
    engine.runner.model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="are not finite"):
        decode_time(engine, 4, 64)
    assert not engine.scheduler.has_work
    engine.runner.model.lm_head.weight.normal_(std=0.02)
    assert decode_time(engine, 4, 64).seconds > 0


def test_a_load_that_nothing_serves_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "step", lambda now: None)
    with pytest.raises(RuntimeError, match="nothing runs, and 0/0, 1/0 wait"):
        serve(engine, jobs("sharegpt", 1e6, 2, 10.0, seed=1, scale=0.05))
