"""Which simulated number stands against which claim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks.paper import decode_steps
from benchmarks.paper import quantities as q
from benchmarks.paper.figures import (
    ALONE_LOADS,
    BREAKDOWN_LOADS,
    BUDGETS,
    COLOCATED,
    DISAGGREGATED,
    HYBRID,
    ONE_GPU,
    ONE_GPU_LOADS,
    SPLIT_LOAD,
)
from benchmarks.paper.orderings import SATURATED, colocated_is_lowest, first_to_saturate
from benchmarks.paper.points import (
    DREAM_ARXIV,
    DREAM_SHAREGPT,
    LLADA_ARXIV,
    LLADA_SHAREGPT,
    PAIRS,
    Pair,
    Point,
    Variant,
    colocated,
    disaggregated,
    hybrid,
)
from benchmarks.paper.quantities import Measure, Quantity


@dataclass(frozen=True)
class Simulated:
    """Attributes:
    how: where the paper leaves something open, what was taken.
    kind: "trace": of the requests that the simulation is given, "setting": of its own settings.
    """

    of: Quantity
    how: str = ""
    kind: Literal["result", "trace", "setting"] = "result"


LOADED, DREAM_LOADED = (6.5, 7.0, 7.5), (7.0, 8.5)
LS, LA, DS, DA = LLADA_SHAREGPT, LLADA_ARXIV, DREAM_SHAREGPT, DREAM_ARXIV
MEAN, P50, P99 = "latency mean", "latency p50", "latency p99"


def _less(pair: Pair, load: float, lower: Variant, higher: Variant, metric: str = MEAN) -> Simulated:
    return Simulated(q.less_by(Measure(pair, lower, load, metric), Measure(pair, higher, load, metric)))


def _over_loads(pair: Pair, loads: tuple[float, ...], lower: Variant, higher: Variant, metric: str) -> list[Quantity]:
    return [_less(pair, load, lower, higher, metric).of for load in loads]


def _at(pair: Pair, variant: Variant, load: float, metric: str = MEAN, how: str = "") -> Simulated:
    return Simulated(Measure(pair, variant, load, metric), how)


def _request(pair: Pair, statistic: str, tau: int, column: str) -> Simulated:
    load = BREAKDOWN_LOADS[pair]
    budgets = [colocated(budget) for budget in BUDGETS]
    point = Point(pair, colocated(tau), load)
    how = f"at {load:g} requests/s: no load given"
    return Simulated(q.of_request(q.request_like(pair, budgets, load, statistic), point, column), how)


def _lengths() -> dict[str, Simulated]:
    parts = [
        (pair, part, statistic)
        for pair in (LS, LA)
        for part in ("prompt", "output")
        for statistic in ("p50", "p99", "std")
    ]
    return {
        f"C{29 + at:03}": Simulated(q.tokens(*part), "the generated trace", "trace") for at, part in enumerate(parts)
    }


def _one_gpu(pair: Pair) -> Quantity:
    return q.comparable_load(pair, ONE_GPU, ONE_GPU_LOADS, ALONE_LOADS)


def _count(holds: Callable[[q.Seeded, Pair], bool]) -> Quantity:
    return lambda seeded: sum(holds(seeded, pair) for pair in PAIRS)


_ALONE_KNEE = {pair: q.alone_knee(pair, ALONE_LOADS) for pair in (LS, LA)}
_KNEE = "where its mean latency is twice that at 0.1"
_COMPARABLE = "where its mean latency is Fast-dLLM's at its knee"
_GROWTH = "batch 64 over batch 1, uncalibrated"
_HIGH = "over 7 and 7.5 requests/s"
_LOADED = "over 6.5, 7 and 7.5 requests/s"
_DREAM = "over 7 and 8.5 requests/s"
_P5_LOW, _P5_HIGH, _P3_LOW, _P3_HIGH = hybrid(5, 1024), hybrid(5, 4096), hybrid(3, 1024), hybrid(3, 4096)
_LARGER = [Measure(LA, colocated(tau), 8.0, P99) for tau in (1024, 2048, 16384)]


def _best_budget(seeded: q.Seeded) -> float:
    return min(BUDGETS, key=lambda tau: Measure(LA, colocated(tau), 8.0, P99)(seeded))


SIMULATED: dict[str, Simulated] = {
    "C001": Simulated(q.least(_over_loads(LS, LOADED, COLOCATED, HYBRID, MEAN)), f"least {_LOADED}"),
    "C002": Simulated(q.most(_over_loads(LS, LOADED, COLOCATED, HYBRID, MEAN)), f"most {_LOADED}"),
    "C003": Simulated(q.least(_over_loads(DA, DREAM_LOADED, HYBRID, COLOCATED, MEAN)), f"least {_DREAM}"),
    "C004": Simulated(q.most(_over_loads(DA, DREAM_LOADED, HYBRID, COLOCATED, MEAN)), f"most {_DREAM}"),
    "C011": Simulated(lambda _: decode_steps.growth("LLaDA-8B"), _GROWTH),
    "C012": Simulated(lambda _: decode_steps.growth("Llama-3-8B"), _GROWTH),
    "C014": Simulated(lambda _: decode_steps.half_throughput_batch("LLaDA-8B"), "half of batch 64's tokens/s"),
    "C015": _at(LS, disaggregated(4), SPLIT_LOAD, "prefill_queue p50"),
    "C016": _at(LS, disaggregated(4), SPLIT_LOAD, P50),
    "C017": _at(LS, disaggregated(6), SPLIT_LOAD, "decode_queue p50"),
    "C018": _at(LS, disaggregated(6), SPLIT_LOAD, P50),
    "C019": Simulated(
        q.total(*(Measure(LS, DISAGGREGATED, SPLIT_LOAD, f"{phase}_queue p50") for phase in ("prefill", "decode")))
    ),
    "C020": _at(LS, DISAGGREGATED, SPLIT_LOAD, P50),
    **_lengths(),
    "C045": Simulated(lambda seeded: seeded.num_requests, kind="setting"),
    "C048": Simulated(_ALONE_KNEE[LS], _KNEE),
    "C049": Simulated(q.alone(LS, 0.5)),
    "C050": Simulated(_one_gpu(LS), _COMPARABLE),
    "C051": Simulated(q.ratio(_one_gpu(LS), _ALONE_KNEE[LS])),
    "C052": Simulated(_ALONE_KNEE[LA], _KNEE),
    "C053": Simulated(_ALONE_KNEE[LA], _KNEE),
    "C054": Simulated(_one_gpu(LA), _COMPARABLE),
    "C055": Simulated(q.ratio(_one_gpu(LA), _ALONE_KNEE[LA])),
    "C056": Simulated(q.ratio(_one_gpu(LA), _ALONE_KNEE[LA])),
    "C063": _at(LS, DISAGGREGATED, 7.5),
    "C064": _at(LS, COLOCATED, 7.5),
    "C065": _at(LS, HYBRID, 7.5),
    "C066": Simulated(_count(first_to_saturate), f"its mean is the first at {SATURATED:g} times colocated's lowest"),
    "C067": Simulated(_count(colocated_is_lowest), "at the highest load that the text names: 7.5, 8, 8.5, 8.5"),
    "C068": _less(DA, 7.0, DISAGGREGATED, COLOCATED),
    "C069": _less(DA, 7.0, DISAGGREGATED, COLOCATED, P99),
    "C070": _less(DA, 7.0, HYBRID, COLOCATED),
    "C071": _less(DA, 7.0, HYBRID, COLOCATED, P99),
    "C074": _at(LS, DISAGGREGATED, 6.5, "prefill_queue p90"),
    "C075": _at(LS, DISAGGREGATED, 6.5, "prefill_queue p99"),
    "C076": _at(LS, COLOCATED, 6.5, "prefill_queue p90"),
    "C077": _at(LS, COLOCATED, 6.5, "prefill_queue p99"),
    "C078": _at(LS, HYBRID, 6.5, "prefill_queue p99"),
    "C079": _at(DA, DISAGGREGATED, 9.5),
    "C080": _at(DA, COLOCATED, 9.5),
    "C081": _at(DA, DISAGGREGATED, 8.5, "decode p99"),
    "C082": _at(DA, COLOCATED, 8.5, "decode p99"),
    "C083": _at(DA, HYBRID, 8.5, "decode p99"),
    "C084": _at(DA, HYBRID, 8.5, "prefill_queue p99"),
    "C085": _at(LS, DISAGGREGATED, 6.5, "decode p50", "taken as the disaggregated one"),
    "C086": _at(LS, COLOCATED, 6.5, "decode p50", "taken as the colocated one"),
    "C087": _at(LS, HYBRID, 6.5, "decode p99"),
    "C088": _at(LS, DISAGGREGATED, 6.5, "decode p99"),
    "C089": Simulated(
        lambda seeded: 1e3 * Measure(LS, DISAGGREGATED, 6.5, "transfer p99")(seeded),
        "a request's sum, at 6.5, until the step that can use it: neither is given",
    ),
    "C090": Simulated(
        lambda seeded: 1e3 * Measure(DA, DISAGGREGATED, 8.5, "transfer p99")(seeded),
        "a request's sum, at 8.5, until the step that can use it: neither is given",
    ),
    "C095": _at(LS, colocated(512), 7.0, P99),
    "C096": _at(LS, colocated(512), 7.5, P99),
    "C097": _at(LS, COLOCATED, 7.5, P99),
    "C098": Simulated(
        q.ratio(
            Measure(LS, colocated(512), 7.5, P99),
            q.least([Measure(LS, colocated(tau), 7.5, P99) for tau in BUDGETS]),
        )
    ),
    "C103": Simulated(
        q.most(
            _over_loads(LS, LOADED, colocated(1024), colocated(2048), P99)
            + _over_loads(DS, (7.0, 8.5), colocated(1024), colocated(2048), P99)
        ),
        "most over loads of both pairs",
    ),
    "C104": _request(LS, "p99", 1024, "prefill_queue"),
    "C105": _request(LS, "p99", 1024, "decode"),
    "C106": _request(LS, "p99", 1024, "latency"),
    "C107": _request(LS, "p99", 16384, "prefill_queue"),
    "C108": _request(LS, "p99", 16384, "decode"),
    "C109": _request(LS, "p99", 16384, "latency"),
    "C110": _request(LS, "p99", 512, "prefill_queue"),
    "C111": _request(LS, "p99", 512, "latency"),
    "C112": _request(DS, "p99", 1024, "decode"),
    "C113": _request(DS, "p99", 16384, "decode"),
    "C114": _request(DS, "p99", 1024, "latency"),
    "C115": _request(DS, "p99", 16384, "latency"),
    "C116": _request(LS, "p50", 16384, "latency"),
    "C117": _request(LS, "p50", 1024, "latency"),
    "C118": _request(DS, "p50", 16384, "latency"),
    "C119": _request(DS, "p50", 1024, "latency"),
    "C120": _at(LA, colocated(512), 7.0, P99),
    "C121": _at(LA, colocated(512), 8.0, P99),
    "C122": Simulated(q.least(_LARGER)),
    "C123": Simulated(q.most(_LARGER)),
    "C124": Simulated(_best_budget, "lowest p99 at 8 requests/s"),
    "C128": _at(LS, _P5_LOW, 7.0, P99),
    "C129": _at(LS, _P5_HIGH, 7.0, P99),
    "C130": _less(LS, 7.0, _P5_LOW, _P5_HIGH, P99),
    "C131": _at(LS, _P5_LOW, 7.5, P99),
    "C132": _at(LS, _P5_HIGH, 7.5, P99),
    "C133": _less(LS, 7.5, _P5_LOW, _P5_HIGH, P99),
    "C134": _less(LS, 6.0, _P3_LOW, _P3_HIGH, P99),
    "C135": Simulated(q.least(_over_loads(LS, (7.0, 7.5), _P3_LOW, _P3_HIGH, P99)), f"least {_HIGH}"),
    "C136": Simulated(q.most(_over_loads(LS, (7.0, 7.5), _P3_LOW, _P3_HIGH, P99)), f"most {_HIGH}"),
    "C137": _at(LS, _P3_LOW, 7.5, P99),
    "C138": _at(LS, _P3_HIGH, 7.5, P99),
    "C139": Simulated(q.more_by(Measure(LS, _P3_LOW, 6.0), Measure(LS, _P3_HIGH, 6.0))),
    "C140": Simulated(q.more_by(Measure(LS, _P3_LOW, 7.5), Measure(LS, _P3_HIGH, 7.5))),
    "C141": _at(LS, _P3_LOW, 7.5),
    "C142": _at(LS, _P3_HIGH, 7.5),
    "C143": Simulated(q.more_by(Measure(LS, _P5_LOW, 7.5), Measure(LS, _P5_HIGH, 7.5)), "at 7.5 requests/s"),
}
