"""Paged attention by FlashInfer: one kernel for whole sequences, blocks and scattered queries alike.

KV is appended by `index_copy_`, not by FlashInfer's own kernel: that one needs each token's sequence and
position beside the page table, to find the slots that are known here already. It would save one small
launch per layer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from backend.attention.base import SequenceSpan
from backend.attention.fence import Fence
from backend.attention.flashinfer_graph import FlashInferGraphAttention
from backend.attention.kv_cache import KVCache, PagedSequence
from backend.attention.page_table import PageTable

# For partial results of sequences that several blocks of threads share, of all wrappers: they run in turn.
# A graph of 64 LLaDA-8B blocks needs 68 MB of it.
_WORKSPACE_BYTES = 256 * 2**20
# Its other kernel for Hopper, "fa3", computes 128 query rows where a block has 32, and cannot share a sequence.
KERNEL = "fa2"
_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128, 256)
_OLDEST_GPU = (8, 0)


def why_unavailable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashInfer cannot serve such a model there; None if it can."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"it needs an NVIDIA GPU, the device is {device}"
    if dtype not in _DTYPES:
        return f"it needs bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim not in _HEAD_DIMS:
        return f"it needs heads of {', '.join(map(str, _HEAD_DIMS))}, the model's have {head_dim}"
    if torch.cuda.get_device_capability(device) < _OLDEST_GPU:
        return "the GPU is older than Ampere"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed (pip install 'sangam-serve[cuda]')"
    try:
        import flashinfer  # noqa: F401
    except Exception as error:  # whatever one of its many dependencies raises
        return f"flashinfer-python cannot be imported: {type(error).__name__}: {error}"
    return None


class FlashInferBackend:
    """See `base.AttentionBackend`.

    Args:
        num_heads: of the queries.
    """

    def __init__(self, cache: KVCache, num_heads: int) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self.cache = cache
        self.workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=cache.data.device)
        self.new_wrapper: Callable[..., Any] = BatchPrefillWithPagedKVCacheWrapper
        self.shape = plan_shape(cache, num_heads)
        self._wrapper = self.new_wrapper(self.workspace, "NHD", backend=KERNEL)
        self._table = self._new_table(1024)
        self._padding = PagedSequence(cache, [cache.scratch_page], cache.page_size)
        self._copied = Fence(cache.data.device)
        self._planned: tuple[Sequence[SequenceSpan], int] | None = None

    def begin(
        self, slots: Tensor, spans: Sequence[SequenceSpan], on_layer: Callable[[int], None] | None = None
    ) -> FlashInferAttention:
        num_rows = len(slots)
        if self._planned is None or self._planned[0] is not spans or self._planned[1] != num_rows:
            self._plan(spans, num_rows)
            self._planned = (spans, num_rows)
        return FlashInferAttention(self.cache, slots, self._wrapper, on_layer)

    def _plan(self, spans: Sequence[SequenceSpan], num_rows: int) -> None:
        lengths = [span.query_end - span.query_start for span in spans]
        sequences = [span.kv for span in spans]
        if padding := num_rows - sum(lengths):
            lengths.append(padding)
            sequences.append(self._padding)
        # The copies of the plan before may still wait on the stream, out of this table and out of
        # FlashInfer's own pinned buffer, which its next plan overwrites.
        self._copied.wait()
        num_pages = sum(len(sequence.pages) for sequence in sequences)
        if num_pages > len(self._table.pages):
            self._table = self._new_table(2 * num_pages)
        table = self._table
        table.fill(lengths, sequences)
        count = table.num_sequences
        self._wrapper.plan(
            table.query_starts[: count + 1],
            table.page_starts[: count + 1],
            table.pages[: table.num_pages],
            table.last_page_lengths[:count],
            **self.shape,
        )
        self._copied.set()

    def _new_table(self, max_pages: int) -> PageTable:
        return PageTable(max_pages, max_pages, is_pinned=self.cache.data.is_cuda)  # no sequence without a page

    def graph_attention(
        self, num_sequences: int, query_length: int, max_sequence_length: int, slots: Tensor
    ) -> FlashInferGraphAttention:
        return FlashInferGraphAttention(
            self.cache,
            lambda **buffers: self.new_wrapper(self.workspace, "NHD", backend=KERNEL, use_cuda_graph=True, **buffers),
            self.shape,
            num_sequences,
            query_length,
            max_sequence_length,
            slots,
        )


def plan_shape(cache: KVCache, num_heads: int) -> dict[str, Any]:
    """What all plans over one cache have in common."""
    page_size, num_kv_heads, head_dim = cache.data.shape[3:]
    return {
        "num_qo_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim_qk": head_dim,
        "page_size": page_size,
        "causal": False,
        "q_data_type": cache.data.dtype,
    }


class FlashInferAttention:
    """See `base.Attention`."""

    def __init__(
        self, cache: KVCache, slots: Tensor, wrapper: Any, on_layer: Callable[[int], None] | None = None
    ) -> None:
        self._cache, self._slots, self._wrapper, self._on_layer = cache, slots, wrapper, on_layer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._cache.keys[layer].index_copy_(0, self._slots, key)
        self._cache.values[layer].index_copy_(0, self._slots, value)
        if self._on_layer is not None:
            self._on_layer(layer)
        out = query.new_empty(query.shape)
        self._wrapper.run(query, self._cache.paged[layer], out=out)
        return out
