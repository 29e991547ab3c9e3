"""The ideas, each one switch against the paper's prototype, and where they are held against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from benchmarks.beyond.debt import Debt
from benchmarks.beyond.in_place import InPlace
from benchmarks.beyond.keeping import Keeping
from benchmarks.beyond.overlap import Overlap
from benchmarks.simulator.config import calibrated
from benchmarks.simulator.graph import Graph
from benchmarks.simulator.runs import Run
from benchmarks.simulator.workload import Workload, draw


@dataclass(frozen=True)
class Baseline:
    """Attributes:
    num_prefill: of 8 workers.
    knee: requests/s at which the mean is three times that of colocated serving at low load, by `benchmarks.paper`.
    """

    name: str
    model: str
    trace: str
    num_prefill: int
    knee: float


BASELINES = (
    Baseline("LLaDA-8B, ShareGPT, colocated", "llada-8b", "sharegpt", 0, 6.96),
    Baseline("LLaDA-8B, ShareGPT, hybrid 5P3C", "llada-8b", "sharegpt", 5, 6.72),
    Baseline("Dream-7B, arXiv, colocated", "dream-7b", "arxiv", 0, 9.59),
    Baseline("Dream-7B, arXiv, hybrid 5P3C", "dream-7b", "arxiv", 5, 9.93),
)

MORE_COLOCATED = (
    Baseline("LLaDA-8B, ShareGPT, hybrid 3P5C", "llada-8b", "sharegpt", 3, 6.72),
    Baseline("Dream-7B, arXiv, hybrid 3P5C", "dream-7b", "arxiv", 3, 9.93),
)
"""At 5P3C's knees; for ideas that take prefills to colocated workers."""


@dataclass(frozen=True, eq=False)
class Idea:
    """Attributes:
    changes: to the configuration.
    needs_prefill: it says nothing about a graph without prefill workers.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    make_graph: Callable[..., Graph] = Graph
    needs_prefill: bool = True


NONE = Idea("the paper's prototype", needs_prefill=False)
IN_PLACE = (
    Idea("in-place refresh where nobody has less", make_graph=InPlace(1)),
    Idea("in-place refresh, 4096 tokens less", make_graph=InPlace(4096)),
)
IDEAS = (
    Idea("LM head where needed", {"has_all_logits": False}, needs_prefill=False),
    Idea("debt up to τ", make_graph=Debt(1), needs_prefill=False),
    Idea("debt up to 4 τ", make_graph=Debt(4), needs_prefill=False),
    Idea("hand-over 1 ms", {"hand_over_s": 0.001}),
    Idea("hand-over 0 ms", {"hand_over_s": 0.0}),
    Idea("prefill steps of 4096 tokens", {"max_prefill_tokens": 4096}),
    Idea("overlapped transfer", make_graph=Overlap()),
    Idea(
        "LM head, hand-over 1 ms and overlap together",
        {"has_all_logits": False, "hand_over_s": 0.001},
        make_graph=Overlap(),
    ),
    *IN_PLACE,
    Idea("prefill workers keep 1 block", make_graph=Keeping(1)),
    Idea("prefill workers keep up to 8", make_graph=Keeping(8)),
)


def run(baseline: Baseline, idea: Idea, load: float, seed: int, num_requests: int) -> Run:
    """`load`: of the baseline's knee."""
    config = calibrated(
        baseline.model, baseline.trace, num_prefill=baseline.num_prefill, num_colocated=8 - baseline.num_prefill
    )
    asked = _workload(baseline.trace, num_requests, seed, round(load * baseline.knee, 6))
    return Run(replace(config, **idea.changes), asked, idea.make_graph)


@cache
def _workload(trace: str, num_requests: int, seed: int, qps: float) -> Workload:
    return draw(trace, num_requests, seed, qps=qps)
