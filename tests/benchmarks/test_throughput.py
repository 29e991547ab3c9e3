"""The comparison's machinery, on few requests; its figures are the benchmark's business."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import throughput
from benchmarks.throughput import SANGAM, SERIAL, SYNCHRONIZED, Run, demo_case, measure, room, table, verdict


def run(seconds: float, steps: int) -> Run:
    return Run(seconds, 0.9 * seconds, 1000, steps, 60, {0: (1,) * 40, 1: (2,) * 20})


BEST = {(SERIAL, 1): run(6.0, 60), (SYNCHRONIZED, 16): run(1.5, 20), (SANGAM, 16): run(1.25, 10)}


def test_the_three_ways_give_the_same_tokens() -> None:
    case = demo_case(6, 0, seed=2)
    best = measure(case, [4], 1)
    assert list(best) == [(SERIAL, 1), (SYNCHRONIZED, 4), (SANGAM, 4)]
    serial, synchronized, ours = best.values()
    assert serial.num_steps == serial.num_forwards == synchronized.num_forwards == ours.num_forwards
    assert ours.num_steps <= synchronized.num_steps < serial.num_steps
    assert serial.num_rows == synchronized.num_rows == ours.num_rows
    assert len(ours.tokens) == 6 and 0 < ours.model_s < ours.seconds


def test_other_tokens_end_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([run(1.0, 1), replace(run(1.0, 1), tokens={0: (1,)})])
    monkeypatch.setattr(throughput, "answer", lambda *_: next(runs))
    with pytest.raises(AssertionError, match="'synchronized', 4.* gave other tokens than one request at a time"):
        measure(demo_case(1, 0, seed=1), [4], 1)


def test_the_table_and_the_verdict() -> None:
    last = table(BEST).splitlines()[-1].split("|")[1:-1]
    assert [cell.strip() for cell in last] == ["sangam", "16", "48.0", "4.80", "1.20", "10", "6.0", "1125.0", "90%"]
    met, missed = verdict(BEST).splitlines()
    assert met == "met: 4.80 x one at a time (goal 4); forward alone 4.80 x, steps 6.0 x"
    assert missed == "MISSED: 1.20 x synchronized (goal 1.5); forward alone 1.20 x, steps 2.0 x"
    assert verdict({(SERIAL, 1): run(6.0, 60)}) == ""


def test_room_is_the_matrix_products_at_the_given_speed() -> None:
    model = demo_case(1, 0, seed=1).model
    per_row = 2 * 4 * (4 * 128 * 128 + 3 * 128 * 384)
    assert room(run(6.0, 60), model, 1e9) == pytest.approx(6.0 / (1000 * per_row / 1e9))
