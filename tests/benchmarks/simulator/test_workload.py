from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.lengths import Length
from benchmarks.simulator.workload import Workload, draw


def test_one_seed_gives_the_same_requests_and_pattern_at_every_rate() -> None:
    slow, fast = draw("arxiv", 300, 1, qps=2.0), draw("arxiv", 300, 1, qps=8.0)
    assert slow.lengths == fast.lengths and slow.canvas_length == 512
    assert slow.arrivals_s == pytest.approx([4 * time for time in fast.arrivals_s])
    assert slow.achieved_rate == pytest.approx(2.0, rel=0.2)
    assert draw("arxiv", 300, 2, qps=2.0).lengths != slow.lengths


@pytest.mark.parametrize("process", ["poisson", "gamma", "bursts"])
def test_arrivals_have_the_rate_that_was_asked_for(process: Any) -> None:
    workload = draw("sharegpt", 4000, 1, qps=5.0, process=process)
    assert workload.achieved_rate == pytest.approx(5.0, rel=0.1)
    assert workload.num_clients == 0 and len(set(workload.arrivals_s)) in (4000, 500)


def test_lengths_and_times_from_files(tmp_path: Path) -> None:
    trace, times = tmp_path / "mine.csv", tmp_path / "times.csv"
    trace.write_text("num_prompt_tokens,num_output_tokens\n40,33\n400,500\n")
    times.write_text("arrival_s\n5\n6\n9\n")
    workload = draw(str(trace), 10, 1, qps=0.5, replay=times, max_total=100)
    assert workload.lengths == (Length(40, 33),) * 3
    assert workload.arrivals_s == (0.0, 1.0, 4.0)
    assert workload.name == "mine as times.csv" and workload.canvas_of(Length(40, 33)) == 64


def test_a_full_trace_is_replayed_row_by_row(tmp_path: Path) -> None:
    trace = tmp_path / "full.csv"
    rows = "".join(f"1,{time},{time + 1},{2 * time + 1}\n" for time in range(30))
    trace.write_text("Date,Time,PromptTokenCount,CompletionTokenCount\n" + rows)
    workload = draw(str(trace), 20, 1, replay=trace)
    assert workload.arrivals_s == tuple(range(20))
    assert workload.lengths == tuple(Length(time + 1, 2 * time + 1) for time in range(20))
    with pytest.raises(ValueError, match="max_total"):
        draw(str(trace), 20, 1, replay=trace, max_total=50)


@pytest.mark.parametrize(
    ("mode", "num_tokens", "canvas"), [("whole blocks", 96, 96), ("fixed length", 96, 96), ("end of text", 96, 128)]
)
def test_a_canvas_holds_the_answer_and_where_there_is_one_its_end(mode: Any, num_tokens: int, canvas: int) -> None:
    workload = Workload("w", (Length(1, 96),), (0.0,), mode=mode)
    assert (workload.num_tokens(Length(1, 96)), workload.canvas_of(Length(1, 96))) == (num_tokens, canvas)
    assert workload.num_tokens(Length(1, 65)) == (96 if mode == "whole blocks" else 65)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arrivals_s": (0.0, 1.0)}, "2 arrivals of 1"),
        ({"arrivals_s": (0.0,), "num_clients": 3}, "one of them"),
        ({}, "one of them"),
        ({"arrivals_s": (0.0,), "canvas_length": 64}, "does not fit the canvas"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload("w", (Length(1, 70),), **options)
    with pytest.raises(ValueError, match="poisson, gamma"):
        draw("arxiv", 1, 1, process="sometimes")  # type: ignore[arg-type]
