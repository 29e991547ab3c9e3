from __future__ import annotations

import pytest
import torch

from backend.attention.kv_cache import KVCache
from backend.core.page_pool import PagePool
from backend.core.prefill_scheduler import PrefillSchedulerConfig
from backend.core.scheduler import Scheduler, SchedulerConfig
from backend.core.synchronized_scheduler import SynchronizedSchedulerConfig
from backend.engine.engine import AnySchedulerConfig
from backend.engine.kv_memory import (
    GPUMemory,
    KVMemoryError,
    bytes_per_token,
    largest_steps,
    measure,
    pool_tokens,
)
from backend.engine.model_runner import ModelRunner
from backend.models.config import ModelConfig
from backend.models.loader import new_model
from tests.backend.core.fake_steps import BLOCK, make, one_each

# The published shapes.
LLADA_8B = ModelConfig("llada", 126464, 126464, 4096, 12288, 32, 32, 32, 4096, 1e-5, 500_000.0, 126336, (126081,))
DREAM_7B = ModelConfig("dream", 151936, 152064, 3584, 18944, 28, 28, 4, 131072, 1e-6, 1e6, 151666, (151643,))
TINY = ModelConfig("llada", 40, 48, 32, 64, 2, 4, 2, 64, 1e-5, 10_000.0, 39, (38,))
CONFIG = SchedulerConfig(token_budget=2048, max_num_seqs=64)


def weights(config: ModelConfig) -> int:
    """Bytes in bfloat16."""
    with torch.device("meta"):
        return 2 * sum(parameter.numel() for parameter in new_model(config).parameters())


def activations(config: ModelConfig) -> int:
    """An upper bound for the largest step of `CONFIG`, in bytes."""
    prefills, blocks, scale = largest_steps(CONFIG, config)
    assert blocks is not None
    tokens = scale * sum(request.sequence_length for request in prefills.prefills)
    # Gate and up, their product, and room for six of the residual's size; bfloat16.
    layer = 2 * tokens * (3 * config.intermediate_size + 6 * config.hidden_size)
    logits = sum(request.block.length for request in blocks.decodes) * config.embedding_size
    return int(layer + 256 * 2**20 + logits * (2 + 4 + 4))  # as they come, in float32, and once more


def test_llada_8b_leaves_90000_tokens_on_80_gb() -> None:
    assert 16.0e9 < weights(LLADA_8B) < 16.1e9
    assert bytes_per_token(LLADA_8B, torch.bfloat16) == 524_288
    memory = GPUMemory(80_000_000_000, 79_000_000_000, weights(LLADA_8B), activations(LLADA_8B))
    assert 2e9 < memory.activations < 5e9
    tokens = pool_tokens(memory, 0.9, bytes_per_token(LLADA_8B, torch.bfloat16), 16)
    assert tokens >= 90_000 and tokens % 16 == 0


def test_dream_7b_with_its_whole_context_on_80_gb() -> None:
    memory = GPUMemory(80_000_000_000, 79_000_000_000, weights(DREAM_7B), activations(DREAM_7B))
    assert pool_tokens(memory, 0.9, bytes_per_token(DREAM_7B, torch.bfloat16), 16) >= 2 * DREAM_7B.max_position


def test_everything_but_a_page_is_given_away() -> None:
    memory = GPUMemory(total=10_000, free=9_000, weights=1_000, activations=500)
    assert pool_tokens(memory, 0.9, token_bytes=10, page_size=16) == (7_500 // 160 - 1) * 16


def test_no_room() -> None:
    memory = GPUMemory(total=10_000, free=9_000, weights=8_000, activations=800)
    with pytest.raises(KVMemoryError, match="0.0 GB of weights and .* leave no room for KV"):
        pool_tokens(memory, 0.9, token_bytes=10, page_size=16)


def test_others_have_it() -> None:
    memory = GPUMemory(total=10_000, free=4_000, weights=1_000, activations=500)
    with pytest.raises(KVMemoryError, match="of the GPU are free, others use it"):
        pool_tokens(memory, 0.9, token_bytes=10, page_size=16)


@pytest.mark.parametrize(
    ("scheduler", "num_tokens", "num_blocks"),
    [
        (SchedulerConfig(115, 5), 294, 5),
        (SchedulerConfig(10**6, 5), 320, 5),
        (SchedulerConfig("auto", 5), 320, 5),
        (SchedulerConfig("auto", 10), 576, 10),
        (PrefillSchedulerConfig(100), 100, 0),
        (PrefillSchedulerConfig(10), 64, 0),
        (SynchronizedSchedulerConfig(3, 0.0), 192, 3),
    ],
)
@pytest.mark.parametrize("architecture", ["llada", "dream"])
def test_the_largest_step_runs(
    scheduler: AnySchedulerConfig, num_tokens: int, num_blocks: int, architecture: str
) -> None:
    config = ModelConfig(architecture, 40, 48, 32, 64, 2, 4, 2, 64, 1e-5, 10_000.0, 39, (38,))
    prefills, blocks, scale = largest_steps(scheduler, config)
    assert sum(request.sequence_length for request in prefills.prefills) == num_tokens and scale == 1.0
    assert len(blocks.decodes if blocks else []) == num_blocks
    model = new_model(config).eval().requires_grad_(False)
    runner = ModelRunner(model, KVCache(2, 1, 16, 2, 8, torch.float32, torch.device("cpu")))
    for plan in filter(None, (prefills, blocks)):
        assert all(commits for commits in runner.run(plan).commits)


def test_no_burst_after_a_trickle_is_larger() -> None:
    settings = SchedulerConfig(token_budget=100, max_num_seqs=64)
    scheduler = Scheduler(settings, PagePool(1000, 4))
    tokens = []
    for i in range(30):
        for j in range(1 if i < 29 else 10):
            scheduler.add(make(f"{i} {j}", prompt=20 if i < 29 else TINY.max_position - BLOCK))
        plan = scheduler.schedule()
        assert plan is not None
        tokens.append(plan.decode_tokens + sum(request.sequence_length for request in plan.prefills))
        scheduler.update(plan, one_each(plan))
    prefills, _, _ = largest_steps(settings, TINY)
    most = sum(request.sequence_length for request in prefills.prefills)
    assert settings.token_budget + TINY.max_position < max(tokens) <= most


def test_a_prefill_too_long_to_be_tried_is_extrapolated() -> None:
    prefills, _, scale = largest_steps(CONFIG, DREAM_7B)
    measured = sum(request.sequence_length for request in prefills.prefills)
    assert measured == 8192 and scale * measured == 2 * CONFIG.token_budget + DREAM_7B.max_position


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measured_on_a_gpu() -> None:
    device = torch.device("cuda")
    model = new_model(TINY).to(device, torch.bfloat16).eval().requires_grad_(False)
    memory = measure(lambda cache: ModelRunner(model, cache), CONFIG, TINY, 16, torch.bfloat16, device)
    assert memory.total > memory.free > 0 and memory.weights > 0
    # The prefill's own gate and up at least, and the blocks' logits in float32.
    assert memory.activations > 2 * (2048 + 64) * 2 * 64 + 4 * 64 * 32 * 40
    assert pool_tokens(memory, 0.5, bytes_per_token(TINY, torch.bfloat16), 16) > 1_000_000
