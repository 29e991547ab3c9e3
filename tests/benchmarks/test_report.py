from __future__ import annotations

import dataclasses

from benchmarks.points import Measured
from benchmarks.report import breakdown_table, document, grouped, latency_table, noise_line
from benchmarks.scrape import Breakdown
from benchmarks.variants import Pools, variants
from tests.benchmarks.canned import SWEEP, measured


def cells(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_runs_are_grouped_by_load_then_variant() -> None:
    found = {key: len(runs) for key, runs in grouped(SWEEP).items()}
    assert found == {(2.0, "hybrid"): 1, (2.0, "colocated"): 1, (4.0, "hybrid"): 2, (4.0, "colocated"): 1}


def test_latencies_per_load_and_variant() -> None:
    head, *rows = cells(latency_table(SWEEP))
    assert rows[0] == ["2", "hybrid", "100", "2.02", "1.98", "0.10", "0.30", "1.00", "0", "8/10", "0"]
    assert rows[2] == [
        "4", "hybrid", "200", "4.04", "3.96", "0.30 (0.20 to 0.40)", "0.90 (0.60 to 1.20)", "2.00", "0", "16/20", "0",
    ]  # fmt: skip
    assert rows[3][head.index("errors")] == "2 HTTP 429"
    assert rows[3][head.index("differing")] == "1"


def test_where_the_time_went() -> None:
    head, *rows = cells(breakdown_table(SWEEP))
    assert head == [
        "load", "variant", "prefill ms", "decode ms", "rest ms", "overflows", "CPU: prefill workers",
        "CPU: colocated workers", "CPU: rest of the graph", "CPU: load generator", "CPU: others",
    ]  # fmt: skip
    assert rows[2] == ["4", "hybrid", "75.0", "150.0", "75.0", "14", "0.00", "0.00", "0.12", "0.00", "0.50"]
    assert "request, as the router measures it" in breakdown_table(SWEEP)


def test_phases_of_blocks_say_so() -> None:
    blocks = [dataclasses.replace(run, breakdown=Breakdown({"decode": 1.0}, True)) for run in SWEEP]
    assert "block, as the workers measure it" in breakdown_table(blocks)
    assert "overflows" not in breakdown_table(blocks) and "rest ms" not in breakdown_table(blocks)


def test_the_noise_is_stated() -> None:
    assert "unknown" in noise_line([measured("a", 1.0, 1.0)])
    assert "2 seeds" in noise_line(SWEEP)
    assert "20% apart" in noise_line([measured("a", 1.0, 0.9), measured("a", 1.0, 1.1, repeat=1)])


def text(results: list[Measured], num_cores: int) -> str:
    setup = {
        "num_cores": num_cores, "prefill": 1, "colocated": 2, "requests": "sharegpt", "length_scale": 0.25,
        "steps_per_block": 16, "mode": "fixed length", "arrivals": "poisson", "duration_s": 60.0, "seeds": [1, 2],
        "slo_s": 2.0,
    }  # fmt: skip
    known = variants(Pools())
    return document(setup, {"hybrid": 7}, [known["colocated"], known["hybrid"]], results)


def test_the_report_says_what_was_compared_and_on_what() -> None:
    found = text(SWEEP, 2)
    assert "hybrid: 1P2C, θ 2048, τ 256; 7 processes" in found
    assert "colocated: 3C, τ 256" in found
    assert "sharegpt x 0.25, fixed length, 16 forwards per block" in found
    assert "seeds 1, 2" in found
    assert "2 cores are shared by 3 workers" in found and "adds no hardware" in found
    assert "adds no hardware" not in text(SWEEP, 8)
