"""Whole steps on a GPU: graphs against eager steps, and that no step waits for the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.core.scheduler import SchedulerConfig
from backend.engine.engine import Engine, EngineConfig
from backend.models.config import ModelConfig
from backend.models.loader import new_model
from tests.backend.engine.test_async_scheduling import plain_requests
from tests.backend.engine.test_engine import EOS, MASK, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),  # kernels may have to be compiled first
]
# Heads of 128, as the published models have: kernels that are brought along may be for no others.
SHAPES = {
    "llada": ModelConfig("llada", 62, 64, 512, 512, 2, 4, 4, 512, 1e-5, 10000.0, MASK, (EOS,)),
    "dream": ModelConfig("dream", 62, 64, 512, 512, 2, 4, 2, 512, 1e-5, 10000.0, MASK, (EOS,), logits_shift=1),
}


def engine(shape: ModelConfig, dtype: str = "bfloat16", attention: str = "auto", **options: bool) -> Engine:
    torch.manual_seed(0)
    model = new_model(shape).to(getattr(torch, dtype)).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    config = EngineConfig(
        Path("random"),
        SchedulerConfig(400, 16),
        kv_cache_tokens=8192,
        dtype=dtype,
        device="cuda",
        attention_backend=attention,  # type: ignore[arg-type]
        **options,
    )
    return Engine.of(model.cuda(), config)


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> ModelConfig:
    return SHAPES[request.param]


def committed(engine: Engine, requests: list[Request]) -> torch.Tensor:
    """The whole first blocks [B, 32], decided in a prefill that commits one token and a step that commits the rest."""
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.has_work:
        engine.step()
    return torch.tensor([request.block.tokens for request in requests])


def two_step_requests(count: int) -> list[Request]:
    """Of a threshold that only the best position of the prefill reaches, and all of the step after it."""
    params = SamplingParams(32, 32, unmasking="quota", steps_per_block=2)
    return [Request(str(i), [(7 * i + j) % 60 for j in range(20 + 9 * i)], params, float(i)) for i in range(count)]


@pytest.mark.parametrize("attention", ["flashinfer", "sdpa"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_graphs_commit_what_eager_steps_do(shape: ModelConfig, dtype: str, attention: str) -> None:
    """But for near ties, each of which may change half a block: kernels of other sizes round otherwise."""
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
    blocks = [
        committed(engine(shape, dtype, attention, enforce_eager=eager), two_step_requests(11))
        for eager in (True, False)
    ]
    assert (blocks[0] == blocks[1]).float().mean() > 0.9


def test_attention_backends_commit_the_same(shape: ModelConfig) -> None:
    pytest.importorskip("flashinfer")
    blocks = [committed(engine(shape, attention=name), two_step_requests(11)) for name in ("sdpa", "flashinfer")]
    assert (blocks[0] == blocks[1]).float().mean() > 0.9


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_all_rules_run_to_their_end(shape: ModelConfig, eager: bool) -> None:
    requests = plain_requests()
    answers = run(engine(shape, enforce_eager=eager), requests)
    assert all(len(answers[request.request_id]) <= request.params.max_tokens for request in requests)
    assert not any(MASK in answer for answer in answers.values())


@pytest.fixture
def no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("no_waiting")
def test_no_step_waits_for_the_device(shape: ModelConfig) -> None:
    """Neither mixed steps nor graphs, once everything is loaded. torch's own attention does."""
    pytest.importorskip("flashinfer")
    of = engine(shape)
    for mode in ("default", "default", "error", "error"):
        steps = []
        for request in two_step_requests(5):
            of.scheduler.add(request)
        torch.cuda.set_sync_debug_mode(mode)
        for _ in range(2):
            plan = of.scheduler.schedule()
            assert plan is not None
            steps.append((plan, of.runner.launch(plan)))
        torch.cuda.set_sync_debug_mode("default")
        for plan, step in steps:
            of.scheduler.update(plan, step.result())
