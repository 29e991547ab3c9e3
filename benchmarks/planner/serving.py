"""From a simulated configuration to the YAML file that `sangam serve` reads (see configs/)."""

from __future__ import annotations

import math
from typing import Any

import yaml

from benchmarks.planner.space import graph_of
from benchmarks.simulator.config import SimulatorConfig
from components.config import RouterConfig

QUEUE_MARGIN = 1.5


def document(config: SimulatorConfig, *, canvas_length: int | None, peak_tokens: int) -> dict[str, dict[str, Any]]:
    """The sections that serve `config`, all that the simulation knows of and no more.

    Args:
        canvas_length: when a request names no length; None: as it comes.
        peak_tokens: prompt + canvas tokens that were in flight at most; the router takes half as many again.
    """
    default = RouterConfig.model_fields["max_queued_tokens"].default
    router: dict[str, Any] = {
        "max_queued_tokens": max(default, math.ceil(QUEUE_MARGIN * peak_tokens)),
        "overflow_threshold": float(config.overflow_threshold),
    }
    if canvas_length:
        router["default_canvas_length"] = canvas_length
    worker = {
        "page_size": config.page_size,
        "kv_cache_tokens": config.num_pages * config.page_size,
        "dtype": "bfloat16",
        "device": "cuda",
    }
    sections: dict[str, dict[str, Any]] = {"router": router}
    if config.num_prefill:
        sections["prefill_worker"] = {
            "num_workers": config.num_prefill,
            "max_prefill_tokens": config.max_prefill_tokens,
            **worker,
        }
    sections["colocated_worker"] = {
        "num_workers": config.num_colocated,
        "token_budget": config.token_budget,
        "max_num_seqs": config.max_num_seqs,
        **worker,
    }
    return sections


def text(config: SimulatorConfig, why: str, **known: Any) -> str:
    """The file; `why` is its first line, a comment. Other arguments: see `document`."""
    graph = graph_of(config)
    head = f"# {why}\n# sangam serve {graph} -f {graph}.yaml --model DIR\n\n"
    sections = document(config, **known)
    return head + "\n".join(yaml.safe_dump({name: keys}, sort_keys=False) for name, keys in sections.items())
