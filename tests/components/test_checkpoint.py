from __future__ import annotations

import pytest
import torch

from backend.core.scheduler import SchedulerConfig
from components.checkpoint import engine_config
from components.config import ColocatedWorkerConfig, ConfigError, load


@pytest.mark.parametrize(
    ("given", "has_gpu", "expected"),
    [
        ({}, False, ("cpu", "float32")),
        ({}, True, ("cuda", "bfloat16")),
        ({"device": "cpu"}, True, ("cpu", "float32")),
        ({"device": "cuda:1"}, True, ("cuda:1", "bfloat16")),
        ({"dtype": "float16"}, True, ("cuda", "float16")),
        ({"dtype": "bfloat16"}, False, ("cpu", "bfloat16")),
        ({"device": "cuda"}, False, ("cuda", "bfloat16")),
    ],
)
def test_a_gpu_is_used_where_there_is_one(
    given: dict[str, str], has_gpu: bool, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    worker = load("colocated_worker", None, {"model": "demo", **given})
    assert isinstance(worker, ColocatedWorkerConfig)
    engine = engine_config(worker, SchedulerConfig(64, 1))
    assert (engine.device, engine.dtype) == expected


@pytest.mark.parametrize("device", ["meta", "mps", "cuda:", "cuda:x", "gpu", ""])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        load("colocated_worker", None, {"model": "demo", "device": device})
