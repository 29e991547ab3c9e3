from __future__ import annotations

import pytest

from benchmarks.paper import claims
from benchmarks.paper.figures import POINTS
from benchmarks.paper.given import NOT_SIMULATED, SETTINGS
from benchmarks.paper.mapping import SIMULATED
from benchmarks.paper.orderings import ORDERINGS
from benchmarks.paper.points import PAIRS
from benchmarks.paper.quantities import Measure

CLAIMS = claims.read()


def test_the_data_file_has_every_claim_once() -> None:
    assert list(CLAIMS) == [f"C{number:03}" for number in range(1, 156)]
    assert all(claim.source and claim.metric and claim.value for claim in CLAIMS.values())


def test_every_claim_is_in_one_place() -> None:
    mapped = [claim_id for of in (SIMULATED, ORDERINGS, SETTINGS, NOT_SIMULATED) for claim_id in of]
    assert sorted(mapped) == list(CLAIMS)


def test_a_measure_is_of_what_its_claim_names() -> None:
    for claim_id, simulated in SIMULATED.items():
        claim, measure = CLAIMS[claim_id], simulated.of
        if not isinstance(measure, Measure):
            continue
        model, trace = measure.pair.label.split(", ")
        assert (claim.model, claim.trace) == (model, trace), claim_id
        assert float(claim.load) == measure.load, claim_id
        _, statistic = measure.metric.split()
        assert {"p50": "median", "p90": "p90", "p99": "p99", "mean": "mean"}[statistic] in claim.metric, claim_id
        variant = measure.variant
        assert (
            not claim.configuration.startswith("colocated tau") or claim.configuration == f"colocated tau={variant.tau}"
        )
        if claim.configuration.startswith("hybrid"):
            assert f"{variant.num_prefill}P{variant.num_colocated}C" in claim.configuration, claim_id
            assert f"tau={variant.tau}" in claim.configuration, claim_id


def test_a_measure_is_in_the_figure_that_its_claim_names() -> None:
    """So that asking for a figure fills in its claims."""
    simulated = {(point.pair, point.variant, point.load) for points in POINTS.values() for point in points}
    for claim_id, entry in SIMULATED.items():
        if isinstance(measure := entry.of, Measure):
            assert (measure.pair, measure.variant, measure.load) in simulated, claim_id


@pytest.mark.parametrize("claim_id", sorted(set(SETTINGS)))
def test_the_simulation_is_given_what_the_paper_says(claim_id: str) -> None:
    assert SETTINGS[claim_id]() == CLAIMS[claim_id].number


def test_all_pairs_have_a_calibration_and_a_label() -> None:
    assert [pair.label for pair in PAIRS] == [
        "LLaDA-8B, ShareGPT",
        "LLaDA-8B, arXiv",
        "Dream-7B, ShareGPT",
        "Dream-7B, arXiv",
    ]
