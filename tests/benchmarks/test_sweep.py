from __future__ import annotations

import asyncio
import csv
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import sweep
from benchmarks.live_graph import GraphFailed
from benchmarks.scrape import Sample
from benchmarks.simulator.denoising import Recorded
from tests.benchmarks.fake_openai import FakeOpenAI


class FakeGraph:
    """Stands in for `LiveGraph`: the fake server in a thread, metrics that grow."""

    started: list[str] = []
    num_processes = 7
    pid = os.getpid()

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        assert folder.is_dir() and "--max-queued-tokens=100000000" in arguments
        self.started.append(arguments[0])
        self._scrapes = 0
        self._steps = next(Path(flag.partition("=")[2]) for flag in arguments if flag.startswith("--steps-file="))
        self._steps.write_text("request,num_steps\nwarm-up,4\n")

    def __enter__(self) -> FakeGraph:
        self._stopped, ready = threading.Event(), threading.Event()

        async def serve() -> None:
            async with FakeOpenAI().running() as self.url:
                ready.set()
                while not self._stopped.is_set():
                    await asyncio.sleep(0.01)

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()))
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def metrics(self) -> dict[Sample, float]:
        self._scrapes += 1
        with self._steps.open("a") as file:
            file.write(f"{self._scrapes},7\n")
        decode = (("phase", "decode"),)
        return {
            ("sangam_router_phase_seconds_sum", decode): 0.5 * self._scrapes,
            ("sangam_router_phase_seconds_count", decode): 10.0 * self._scrapes,
        }


@pytest.fixture(autouse=True)
def fake_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGraph.started = []
    monkeypatch.setattr(sweep, "LiveGraph", FakeGraph)
    monkeypatch.setattr(sweep, "SETTLE_S", 0.0)


def test_a_sweep_measures_every_variant_and_writes_it_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--variants=colocated,hybrid", "--loads=20,40", "--duration-s=0.3", "--seeds=1", "--warm-up=1"]
    assert sweep.main(["--live", f"--out={tmp_path}", *flags]) == 0
    assert FakeGraph.started == ["colocated", "hybrid", "hybrid", "colocated"]
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["setup"]["loads"] == [20.0, 40.0] and written["setup"]["mode"] == "fixed length"
    assert str(tmp_path) not in json.dumps(written)
    points = written["points"]
    assert [point["point"]["variant"] for point in points] == FakeGraph.started
    assert points[0]["summary"]["num_requests"] == points[1]["summary"]["num_requests"] > 0, "the same for both"
    assert points[0]["breakdown"]["phase_s"] == {"decode": 0.05}
    with (tmp_path / "results.csv").open() as file:
        assert [row["variant"] for row in csv.DictReader(file)] == FakeGraph.started
    report = (tmp_path / "report.md").read_text()
    assert "| 20   | colocated |" in report and report in capsys.readouterr().out
    assert (tmp_path / "latency.png").exists()
    steps = sorted((tmp_path / "steps").iterdir())
    assert [path.name for path in steps] == [f"{v}-{r}-1.csv" for v in ("colocated", "hybrid") for r in (20, 40)]
    assert list(Recorded(steps[0]).draw(1, 0, 2, 32)) == [7, 7], "without the warm-up's"


def test_a_graph_that_fails_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FakeGraph) -> dict[Sample, float]:
        raise GraphFailed("router is gone")

    monkeypatch.setattr(FakeGraph, "metrics", fail)
    assert sweep.main(["--live", f"--out={tmp_path}", "--loads=20", "--warm-up=0", "--variants=colocated"]) == 1


@pytest.mark.parametrize("flags", [["--variants=colocated,best"], ["--arrivals=closed"], ["--loads=fast"]])
def test_what_cannot_be_compared_is_refused(tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        sweep.main(["--live", f"--out={tmp_path}", *flags])
    assert not FakeGraph.started
