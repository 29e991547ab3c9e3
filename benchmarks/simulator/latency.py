"""How long a step and a KV transfer take on a GPU: a roofline, or a measured table."""

from __future__ import annotations

import csv
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.simulator.hardware import GPU, Model

_COLUMNS = ("num_decodes", "mean_context", "prefill_tokens", "seconds")


class Latency(Protocol):
    def step_s(
        self, prefills: Sequence[int], num_decodes: int, context_tokens: int, decode_tokens: int | None = None
    ) -> float:
        """Seconds of one step.

        Args:
            prefills: tokens of each; refreshes in the middle of blocks are prefills, too.
            context_tokens: KV that the decodes read, in tokens, of all together.
            decode_tokens: that the decodes compute, of all together; None: a block of each.
        """
        ...


@dataclass(frozen=True)
class Efficiencies:
    """Which part of a peak is reached, and what the host adds.

    gemm, elementwise and the norm's exponent are from Vidur's public H100 profile of Llama-2-7B (259 points, residual
    6%); the others are assumptions that were moved by hand. None was measured here.

    Attributes:
        overall: multiplies all compute-side rates; 1 is what microbenchmarks reach. The constant to calibrate.
        norm: compute and memory time of a GEMM are joined as (a^p + b^p)^(1/p), not as their maximum.
        step_s, request_s: the host's time of a step, and of each of its requests.
        launch_s: least GPU time of a step with a prefill, which runs without a CUDA graph.
    """

    overall: float = 1.0
    gemm: float = 0.765
    weights: float = 0.88
    norm: float = 1.2
    attention: float = 0.45
    kv: float = 0.40
    elementwise: float = 0.54
    step_s: float = 0.8e-3
    request_s: float = 0.25e-3
    launch_s: float = 14e-3


GRAPH_BATCHES = (1, 2, 4, *range(8, 513, 8))
"""Batches of decode-only steps are padded to the next of these (CUDA graphs)."""


class Roofline:
    """Step time from the model's shape and the GPU's peaks.

    Args:
        has_all_logits: the LM head runs over all positions of a step (the paper's prototype), else over
            the current block of each request.
    """

    def __init__(
        self, model: Model, gpu: GPU, rates: Efficiencies, block_length: int = 32, *, has_all_logits: bool = False
    ) -> None:
        self._rates, self._block_length, self._has_all_logits = rates, block_length, has_all_logits
        flops, elementwise = rates.overall * gpu.flops, rates.overall * rates.elementwise * gpu.bytes_per_s
        head_params, p = model.width * model.vocab, rates.norm
        self._gemm = 2 * model.layer_params / (rates.gemm * flops)
        self._weights = (2 * model.layer_params / (rates.weights * gpu.bytes_per_s)) ** p
        self._head = 2 * head_params / (rates.gemm * flops)
        self._head_weights = (2 * head_params / (rates.weights * gpu.bytes_per_s)) ** p
        self._logits = 4 * model.vocab / elementwise
        self._elementwise = 2 * (14 * model.width + 3 * model.ffn_width) * model.layers / elementwise
        self._attention = 4 * model.heads * model.head_dim * model.layers / (rates.attention * flops)
        self._kv = model.kv_bytes_per_token / (rates.kv * gpu.bytes_per_s)
        self._context = max(self._kv, self._attention * block_length)
        padded = (GRAPH_BATCHES[bisect_left(GRAPH_BATCHES, batch)] for batch in range(GRAPH_BATCHES[-1] + 1))
        self._decode_only = [self._dense_s(batch * block_length, batch) for batch in padded]

    def step_s(
        self, prefills: Sequence[int], num_decodes: int, context_tokens: int, decode_tokens: int | None = None
    ) -> float:
        """A step is a CUDA graph if it is decodes alone and each computes its block, no more and no less."""
        rates = self._rates
        num_requests = num_decodes + len(prefills)
        host_s = rates.step_s + rates.request_s * num_requests
        blocks, per_token = self._block_length * num_decodes, self._context
        if decode_tokens is None or decode_tokens == blocks:
            if not prefills:
                return host_s + self._padded_s(num_decodes) + per_token * context_tokens
        else:
            # As if each computed as many as the mean decode.
            blocks, per_token = decode_tokens, max(self._kv, self._attention * decode_tokens / num_decodes)
        tokens = sum(prefills)
        squares = sum(length * length for length in prefills)
        attention_s = per_token * context_tokens + max(self._attention * squares, self._kv * tokens)
        gpu_s = self._dense_s(tokens + blocks, num_requests) + attention_s
        return host_s + max(gpu_s, rates.launch_s)

    def _padded_s(self, num_decodes: int) -> float:
        if num_decodes > GRAPH_BATCHES[-1]:
            return self._dense_s(num_decodes * self._block_length, num_decodes)
        return self._decode_only[num_decodes]

    def _dense_s(self, tokens: int, num_requests: int) -> float:
        """All but attention."""
        p = self._rates.norm
        rows = tokens if self._has_all_logits else self._block_length * num_requests
        gemm_s = ((self._gemm * tokens) ** p + self._weights) ** (1 / p)
        head_s = ((self._head * rows) ** p + self._head_weights) ** (1 / p)
        return float(gemm_s + head_s + self._logits * rows + self._elementwise * tokens)


class Measured:
    """Step times of a profile: a CSV file with the columns num_decodes, mean_context, prefill_tokens, seconds.

    Rows are steps of decodes alone or of one prefill alone. Between them it is linear (in the number of
    decodes, and in the context among rows of the same number), beyond them it goes on as between the last
    two. A mixed step is its prefills and its decodes one after the other, less what the line through the
    decodes gives for none: weights are read and kernels launched once. Decodes that compute more or fewer
    tokens than a block each count as so many decodes as there are blocks in their tokens.

    Args:
        block_length: of the profile's decodes.

    Raises:
        ValueError: other columns, or fewer than two points of either kind.
    """

    def __init__(self, path: Path, block_length: int = 32) -> None:
        self._block_length = block_length
        with path.open(newline="") as file:
            try:
                rows = [tuple(float(row[column]) for column in _COLUMNS) for row in csv.DictReader(file)]
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{path}: expected the columns {', '.join(_COLUMNS)}, numbers") from None
        self._prefill = sorted({tokens: s for n, _, tokens, s in rows if not n}.items())
        batches: dict[float, dict[float, float]] = {}
        for num_decodes, context, tokens, seconds in rows:
            if num_decodes and not tokens:
                batches.setdefault(num_decodes, {})[context] = seconds
        self._decode = sorted((n, sorted(by_context.items())) for n, by_context in batches.items())
        if len(self._prefill) < 2 or len(self._decode) < 2:
            raise ValueError(f"{path}: expected two or more prefills and two or more batches of decodes")

    def __repr__(self) -> str:
        return f"Measured({self._prefill!r}, {self._decode!r}, {self._block_length})"

    def step_s(
        self, prefills: Sequence[int], num_decodes: int, context_tokens: int, decode_tokens: int | None = None
    ) -> float:
        seconds = _linear(self._prefill, sum(prefills)) if prefills else 0.0
        if not num_decodes:
            return seconds
        context = context_tokens / num_decodes
        curve = [(n, _linear(by_context, context)) for n, by_context in self._decode]
        seconds += _linear(curve, num_decodes if decode_tokens is None else decode_tokens / self._block_length)
        if prefills:
            seconds -= max(_linear(curve, 0), 0.0)
        return seconds


def _linear(points: Sequence[tuple[float, float]], x: float) -> float:
    if len(points) == 1:
        return points[0][1]
    at = min(max(bisect_right(points, x, key=lambda point: point[0]), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
