from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.beyond.routers import SeveralRouters
from benchmarks.simulator import runs
from benchmarks.simulator.config import SimulatorConfig, calibrated
from benchmarks.simulator.result import Result
from benchmarks.simulator.runs import Run, run_many
from benchmarks.simulator.simulate import simulate
from benchmarks.simulator.workload import draw

CONFIG = calibrated("llada-8b", "sharegpt", num_colocated=2)
WORKLOADS = [draw("sharegpt", 20, seed, qps=1.0) for seed in (1, 2)]


def same(one: Result, other: Result) -> bool:
    columns = all(np.array_equal(one.requests[name], other.requests[name]) for name in one.requests)
    return columns and replace(one, requests={}) == replace(other, requests={})


def test_results_come_in_order_from_processes_and_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [Run(CONFIG, WORKLOADS[0]), Run(CONFIG, WORKLOADS[1]), Run(CONFIG, WORKLOADS[0])]
    results = run_many(asked, num_processes=2, folder=tmp_path)
    expected = [simulate(run.config, run.workload) for run in asked]
    assert all(map(same, results, expected)) and not same(results[0], results[1])
    assert len(list(tmp_path.iterdir())) == 2

    def fail(config: SimulatorConfig, workload: object, **_: object) -> Result:
        raise AssertionError("run again")

    monkeypatch.setattr(runs, "simulate", fail)
    assert all(map(same, run_many(asked, folder=tmp_path), expected))
    with pytest.raises(AssertionError, match="run again"):
        run_many([Run(replace(CONFIG, token_budget=512), WORKLOADS[0])], folder=tmp_path)


def test_a_broken_file_is_run_again(tmp_path: Path) -> None:
    run = Run(CONFIG, WORKLOADS[0])
    (tmp_path / f"{run.key}.npz").write_bytes(b"half a fi")
    assert same(run_many([run], folder=tmp_path)[0], simulate(run.config, run.workload))
    assert same(Result.load(tmp_path / f"{run.key}.npz"), simulate(run.config, run.workload))


def test_what_fails_in_a_process_is_raised(tmp_path: Path) -> None:
    bad = Run(replace(CONFIG, kv_cache_tokens=64), WORKLOADS[0])
    with pytest.raises(ValueError, match="do not fit"):
        run_many([bad, Run(CONFIG, WORKLOADS[0])], num_processes=2, folder=tmp_path)


def test_a_key_names_everything_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(CONFIG, WORKLOADS[0])
    others = [
        Run(replace(CONFIG, hop_s=0.002), run.workload),
        Run(CONFIG, replace(run.workload, seed=9)),
        Run(CONFIG, replace(run.workload, mode="fixed length")),
        Run(CONFIG, run.workload, SeveralRouters(2, 0.1)),
        Run(CONFIG, run.workload, SeveralRouters(2, 0.2)),
    ]
    assert run.key == Run(replace(CONFIG), draw("sharegpt", 20, 1, qps=1.0)).key
    assert len({run.key, *(other.key for other in others)}) == 6
    key = run.key
    monkeypatch.setattr(runs, "_code", lambda: "changed")
    assert run.key != key
