"""Which share of the time a GPU works: the union of what the profiler saw on it over the time from first to last."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def busy_share(run: Callable[[], object]) -> float | None:
    """Of `run`, which must keep the GPU's work going; None without a GPU, or if the profiler saw nothing on it."""
    if not torch.cuda.is_available():
        run()
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in _ON_GPU]
    return share_covered(spans) if spans else None


def share_covered(spans: Iterable[tuple[float, float]]) -> float:
    """Of the time from the first start to the last end, how much at least one of `spans` covers."""
    ordered = sorted(spans)
    covered, (start, end) = 0.0, ordered[0]
    for begin, finish in ordered[1:]:
        if begin > end:
            covered += end - start
            start, end = begin, finish
        end = max(end, finish)
    return (covered + end - start) / max(end - ordered[0][0], 1e-9)
