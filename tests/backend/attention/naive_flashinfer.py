"""FlashInfer's paged prefill in plain torch: what its tables mean, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
"""(method, arguments, keyword arguments) of every call."""


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, workspace: Tensor, kv_layout: str, **options: Any) -> None:
        CALLS.append(("__init__", (workspace, kv_layout), options))
        assert kv_layout == "NHD"
        self.options = options
        self.num_plans = 0

    def plan(
        self, query_starts: Tensor, page_starts: Tensor, pages: Tensor, last_page_lengths: Tensor, **shape: Any
    ) -> None:
        CALLS.append(("plan", (query_starts, page_starts, pages, last_page_lengths), shape))
        tables = (query_starts, page_starts, pages, last_page_lengths)
        assert {table.dtype for table in tables} == {torch.int32} and shape["causal"] is False
        self.num_plans += 1
        if self.options.get("use_cuda_graph"):
            names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
            self.tables = tuple(self.options[name] for name in names)
            for of, buffer, table in zip(names, self.tables, tables, strict=True):
                if of != "paged_kv_indices_buf":
                    assert len(buffer) == len(table)
                buffer[: len(table)].copy_(table)
            query_lengths = query_starts.diff()
            assert (query_lengths == shape["uniform_q_len"]).all()
        else:
            self.tables = tuple(table.clone() for table in tables)

    def run(self, query: Tensor, paged_kv: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        CALLS.append(("run", (query, paged_kv), {"out": out}))
        query_starts, page_starts, pages, last_page_lengths = self.tables
        assert len(query) == query_starts[-1] and not torch.isnan(query).any()
        for i, last in enumerate(last_page_lengths):
            rows = slice(query_starts[i], query_starts[i + 1])
            of = pages[page_starts[i] : page_starts[i + 1]].long()
            length = (len(of) - 1) * paged_kv[0].shape[1] + int(last)
            k, v = (x[of].flatten(0, 1)[:length] for x in paged_kv)
            group = query.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            scores = torch.einsum("thd,shd->hts", query[rows], k) / query.shape[-1] ** 0.5
            out[rows] = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
        return out
