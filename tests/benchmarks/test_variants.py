from __future__ import annotations

import argparse
import math
from typing import Any

import pytest

from benchmarks.variants import Pools, variants
from graphs.__main__ import CONFIGS, GRAPHS
from graphs.flags import add, given
from graphs.launch import Settings

POOLS = Pools(num_prefill=1, num_colocated=2, overflow_threshold=512, token_budget=64)


def sections(name: str) -> dict[str, Any]:
    """What `sangam serve` makes of a variant's arguments."""
    graph, *flags = variants(POOLS)[name].arguments
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add(parser, GRAPHS[graph])
    return dict(
        Settings(GRAPHS[graph], CONFIGS / f"{graph}.yaml", given(parser.parse_args(flags), GRAPHS[graph])).sections
    )


@pytest.mark.parametrize("name", variants(POOLS))
def test_every_variant_is_a_graph_with_the_same_number_of_workers(name: str) -> None:
    found = sections(name)
    assert sum(config.num_workers for section, config in found.items() if "worker" in section) == 3


def test_variants_are_what_their_names_say() -> None:
    assert sections("colocated")["colocated_worker"].token_budget == 64
    assert math.isinf(sections("disaggregated")["router"].overflow_threshold)
    hybrid, conditional, eager = (sections(name) for name in ("hybrid", "conditional", "prefill-prioritizing"))
    assert (hybrid["router"].overflow_threshold, hybrid["router"].routing) == (512, "hybrid")
    assert hybrid["colocated_worker"].token_budget == 64
    assert conditional["router"].routing == "conditional"
    assert conditional["colocated_worker"].token_budget == eager["colocated_worker"].token_budget == 1_000_000
    assert eager["router"] == hybrid["router"]
