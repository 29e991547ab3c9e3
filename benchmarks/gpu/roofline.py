"""The least time that a step can take on a GPU: its arithmetic at peak or its bytes at peak, whichever is more.

Peaks are those of the data sheet (`benchmarks/simulator/data/gpus.yaml`), which no kernel reaches.
"""

from __future__ import annotations

from benchmarks.simulator.hardware import GPU, Model

_BYTES = 2


def decode_s(model: Model, gpu: GPU, batch: int, context: int, block_length: int = 32) -> float:
    """Seconds of a denoising step of `batch` blocks over `context` tokens of KV each, LM head on all of each block."""
    tokens = batch * block_length
    return _s(model, gpu, tokens, tokens, tokens * context, batch * context)


def prefill_s(model: Model, gpu: GPU, length: int, block_length: int = 32) -> float:
    """Seconds of one prefill of `length` tokens, LM head on one block."""
    return _s(model, gpu, length, block_length, length * length, length)


def _s(model: Model, gpu: GPU, tokens: int, logit_rows: int, pairs: int, kv_tokens: int) -> float:
    head = model.width * model.vocab
    flops = 2 * model.layer_params * tokens + 2 * head * logit_rows
    flops += 4 * model.heads * model.head_dim * model.layers * pairs
    moved = _BYTES * (model.layer_params + head + logit_rows * model.vocab) + model.kv_bytes_per_token * kv_tokens
    return max(flops / gpu.flops, moved / gpu.bytes_per_s)
