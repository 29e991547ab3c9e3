from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.paper import one_at_a_time
from benchmarks.paper import quantities as q
from benchmarks.paper.points import LLADA_ARXIV, LLADA_SHAREGPT, PAIRS, Point, colocated, workload
from benchmarks.paper.quantities import Measure, NotRun, request_like
from benchmarks.simulator.simulate import simulate
from tests.benchmarks.paper.canned import seeded

HIGH, LOW = (Point(LLADA_SHAREGPT, colocated(tau), 6.5) for tau in (1024, 512))


def measure(point: Point) -> Measure:
    return Measure(point.pair, point.variant, point.load)


def test_differences_are_in_percent_of_the_second() -> None:
    results = seeded({HIGH: [3.0, 5.0], LOW: [4.0, 6.0]})
    assert q.less_by(measure(HIGH), measure(LOW))(results) == pytest.approx(20)
    assert q.more_by(measure(LOW), measure(HIGH))(results) == pytest.approx(25)


def test_what_was_not_simulated_is_not_made_up() -> None:
    with pytest.raises(NotRun):
        measure(LOW)(seeded({HIGH: [1.0]}))


def test_one_request_is_shown_that_is_typical_of_all_variants() -> None:
    results = seeded({HIGH: [1.0, 2.4, 3.0, 4.0, 5.0], LOW: [1.0, 2.0, 9.0, 2.4, 3.0]})
    # Request 2 is the median of the first but the slowest of the second; 1 is 20% and 17% under the two medians.
    assert request_like(LLADA_SHAREGPT, [HIGH.variant, LOW.variant], 6.5, "p50")(results) == 1


def test_one_at_a_time_is_the_simulator_with_nobody_waiting() -> None:
    """The same requests so far apart that they never meet: queueing is all that sets the two apart."""
    for pair in (LLADA_SHAREGPT, LLADA_ARXIV):
        point = Point(pair, colocated(num_gpus=1), 1e-3)
        simulated = simulate(point.config, workload(pair, point.load, 6, 1)).requests["latency_s"]
        computed = one_at_a_time.latencies_s(pair, point.load, 6, 1)
        np.testing.assert_allclose(computed, simulated, rtol=1e-9)


def test_one_at_a_time_queues_in_order_of_arrival() -> None:
    latencies = one_at_a_time.latencies_s(LLADA_SHAREGPT, 100.0, 20, 1)
    due_s = np.array(workload(LLADA_SHAREGPT, 100.0, 20, 1).arrivals_s)
    alone = one_at_a_time.latencies_s(LLADA_SHAREGPT, 1e-4, 20, 1)
    finished = due_s + latencies
    np.testing.assert_allclose(np.diff(finished), alone[1:], rtol=1e-9)


def test_a_model_has_one_efficiency_and_its_traces_their_forwards() -> None:
    for model in {pair.model for pair in PAIRS}:
        configs = [Point(pair, colocated(), 1.0).config for pair in PAIRS if pair.model == model]
        assert len({config.rates for config in configs}) == len({config.hand_over_s for config in configs}) == 1
        assert len({config.steps for config in configs}) == len(configs) == 2


def test_no_hand_over_cost_changes_nothing_else() -> None:
    fitted, without = (Point(LLADA_SHAREGPT, colocated(), 1.0, c).config for c in ("as fitted", "no hand-over cost"))
    assert fitted.hand_over_s > 0 and without == replace(fitted, hand_over_s=0.0)
