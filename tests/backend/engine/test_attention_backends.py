"""The engine over other attention than torch's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from backend.attention.base import Attention, AttentionUnavailableError, GraphAttention, SequenceSpan
from backend.attention.flashinfer import FlashInferBackend
from backend.attention.sdpa import SdpaBackend
from backend.core.cache_policy import CACHE_POLICIES
from backend.engine.engine import CPU_KV_CACHE_TOKENS, Engine, EngineConfig
from backend.engine.model_runner import ModelRunner
from backend.models.config import ModelConfig
from components.config import DEMO_MODELS
from tests.backend.attention import naive_flashinfer
from tests.backend.engine.test_engine import DREAM, LLADA, mixed_requests, run, small_engine


class Compared:
    """Two backends over one cache, of which the second has to say what the first says."""

    def __init__(self, first: SdpaBackend, second: FlashInferBackend) -> None:
        self._first, self._second = first, second
        self.num_forwards = 0

    def begin(
        self, slots: Tensor, spans: Sequence[SequenceSpan], on_layer: Callable[[int], None] | None = None
    ) -> Attention:
        self.num_forwards += 1
        self._both = (self._first.begin(slots, spans, on_layer), self._second.begin(slots, spans))
        self._num_rows = spans[-1].query_end
        return self

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        expected, found = (attention.attend(layer, query, key, value) for attention in self._both)
        rows = slice(0, self._num_rows)
        torch.testing.assert_close(found[rows], expected[rows], atol=1e-4, rtol=1e-4)
        return expected

    def graph_attention(self, *arguments: object) -> GraphAttention:
        raise NotImplementedError


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_flashinfer_is_asked_for_the_same_by_every_cache_policy(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", naive_flashinfer)
    engine = small_engine(config=config)
    runner = engine.runner
    compared = Compared(SdpaBackend(runner.cache), FlashInferBackend(runner.cache, config.num_heads))
    engine.runner = ModelRunner(runner.model, runner.cache, compared)
    requests = mixed_requests(16)
    assert {request.params.cache_policy for request in requests} == set(CACHE_POLICIES)
    answers = run(engine, requests)
    assert len(answers) == 16 and compared.num_forwards > 16
    naive_flashinfer.CALLS.clear()


def test_a_backend_that_cannot_run_ends_the_start() -> None:
    config = EngineConfig(DEMO_MODELS["demo"], attention_backend="flashinfer")
    with pytest.raises(AttentionUnavailableError, match="it needs an NVIDIA GPU, the device is cpu"):
        Engine.from_config(config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_auto_on_a_cpu(dtype: str) -> None:
    engine = Engine.from_config(EngineConfig(DEMO_MODELS["demo"], dtype=dtype))
    assert isinstance(engine.runner.attention, SdpaBackend)
    assert engine.scheduler.pool.num_pages * engine.scheduler.pool.page_size == CPU_KV_CACHE_TOKENS
    assert engine.runner.cache.data.dtype == getattr(torch, dtype)
