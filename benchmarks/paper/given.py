"""Claims that are settings, which the simulation is given, and those that it cannot speak about."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.lengths import MAX_TOTAL, TRACES
from benchmarks.paper import decode_steps
from benchmarks.paper.figures import BUDGETS, CDF_LOADS, COLOCATED, DISAGGREGATED, HYBRID, HYBRIDS, SPLIT_LOAD
from benchmarks.paper.points import DREAM_ARXIV, LLADA_ARXIV, LLADA_SHAREGPT, Point, workload
from benchmarks.simulator.config import SimulatorConfig

_CONFIG: SimulatorConfig = Point(LLADA_SHAREGPT, COLOCATED, SPLIT_LOAD).config


def _num_workers() -> float:
    return _CONFIG.num_prefill + _CONFIG.num_colocated


def _num_blocks(num_tokens: int) -> float:
    return -(-num_tokens // workload(LLADA_ARXIV, 1.0, 1, 1).block_length)


SETTINGS: dict[str, Callable[[], float]] = {
    "C009": lambda: decode_steps.CONTEXT,
    "C010": lambda: decode_steps.BATCHES[-1],
    "C013": lambda: decode_steps.DECODERS[0].block_length,
    "C021": _num_workers,
    "C025": _num_workers,
    "C026": lambda: _CONFIG.device.memory_gb,
    "C027": lambda: _CONFIG.page_size,
    "C028": lambda: workload(LLADA_SHAREGPT, 1.0, 1, 1).block_length,
    "C041": lambda: MAX_TOTAL,
    "C042": lambda: TRACES["sharegpt"].canvas_length,
    "C043": lambda: TRACES["arxiv"].canvas_length,
    "C044": lambda: _num_blocks(266),
    "C058": lambda: COLOCATED.tau,
    "C059": lambda: DISAGGREGATED.num_prefill,
    "C060": lambda: DISAGGREGATED.num_colocated,
    "C061": lambda: HYBRID.theta,
    "C062": lambda: HYBRID.tau,
    "C072": lambda: CDF_LOADS[LLADA_SHAREGPT],
    "C073": lambda: CDF_LOADS[DREAM_ARXIV],
    "C091": lambda: BUDGETS[0],
    "C092": lambda: BUDGETS[1],
    "C093": lambda: BUDGETS[2],
    "C094": lambda: BUDGETS[3],
    "C125": lambda: HYBRIDS[0].theta,
    "C126": lambda: HYBRIDS[0].tau,
    "C127": lambda: HYBRIDS[1].tau,
}

NOT_SIMULATED = {
    "C005": "what others advertise",
    "C006": "what others advertise",
    "C007": "an illustration",
    "C008": "an illustration",
    "C022": "a property, not a measurement; tests/backend/core/test_budget.py proves it",
    "C023": "an illustration",
    "C024": "the size of their code",
    "C046": "nothing is sampled: forwards per block are drawn, as the text does not give their mean or spread",
    "C047": "an assumption of the cost model (14 ms to launch a step without a graph), not a result",
    "C057": "one request at a time by construction",
    "C144": "about another system",
    "C145": "about other systems",
}
