"""Real graphs, one at a time, started by `serve` as a user does, and the engine itself to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.reference import MODEL, Reference, write_chaotic_model
from tests.e2e.served import Served

# Short enough to wait for, long enough for a process that a busy machine does not let run.
WORKER_TIMEOUT_S = 4.0
TIMEOUT = f"--worker-timeout-s={WORKER_TIMEOUT_S}"
TWO_WORKERS = ("colocated", "--workers=2", TIMEOUT)
SMALL = ("colocated", "--workers=1", "--request-plane=tcp", "--max-queued-tokens=600", "--context-length=512")

# A few prefills, and the pool is saturated: under load about as many overflow as do not. Steps are launched
# ahead of each other, as on a GPU; in the other graphs, as on a CPU, they are not.
HYBRID = ("hybrid", "--prefill=1", "--colocated=2", "--overflow-threshold=600", "--async-scheduling=true", TIMEOUT)
DISAGGREGATED = ("disaggregated", "--prefill=2", "--colocated=1", TIMEOUT)


# Its graph is its own, and half of its time is waiting.
BESIDE_THE_OTHERS = "test_chaos.py"


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process for all tests that share graphs."""
    for item in items:
        if item.get_closest_marker("e2e") and item.path.name != BESIDE_THE_OTHERS:
            item.add_marker(pytest.mark.xdist_group("graphs"))


class _OneAtATime:
    """Stops one graph before it starts the next, wherever tests of both stand."""

    def __init__(self, folder: pytest.TempPathFactory) -> None:
        self._folder = folder
        self._name = ""
        self._served: Served | None = None

    def get(self, name: str, model: Path, flags: tuple[str, ...]) -> Served:
        if self._name != name or self._served is None or not self._served.is_running:
            self.stop()
            self._name, self._served = name, Served(self._folder.mktemp(name), model, *flags)
            self._served.wait_until_ready()
        return self._served

    def stop(self) -> None:
        served, self._served = self._served, None
        if served is not None:
            served.stop()


@pytest.fixture(scope="session")
def _graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_OneAtATime]:
    graphs = _OneAtATime(tmp_path_factory)
    yield graphs
    graphs.stop()


@pytest.fixture(scope="session")
def chaotic_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chaotic")
    write_chaotic_model(folder)
    return folder


@pytest.fixture
def graph(_graphs: _OneAtATime) -> Iterator[Served]:
    """The demonstration model on two workers. Every test finds it whole and idle, and leaves it so."""
    served = _graphs.get("graph", MODEL, TWO_WORKERS)
    served.wait_until_whole(num_workers=2)
    yield served
    served.wait_until_whole(num_workers=2)


@pytest.fixture
def chaotic_graph(_graphs: _OneAtATime, chaotic_model: Path) -> Iterator[Served]:
    """As `graph`, with a model whose answers are long and easily upset."""
    served = _graphs.get("chaotic_graph", chaotic_model, TWO_WORKERS)
    served.wait_until_whole(num_workers=2)
    yield served
    served.wait_until_whole(num_workers=2)


@pytest.fixture
def small_graph(_graphs: _OneAtATime) -> Iterator[Served]:
    """One worker over the tcp request plane, with room for a few requests only."""
    served = _graphs.get("small_graph", MODEL, SMALL)
    served.wait_until_whole(num_workers=1)
    yield served
    served.wait_until_whole(num_workers=1)


@pytest.fixture
def hybrid_graph(_graphs: _OneAtATime, chaotic_model: Path) -> Iterator[Served]:
    """One prefill worker, two colocated ones, and prefills that overflow."""
    served = _graphs.get("hybrid_graph", chaotic_model, HYBRID)
    served.wait_until_whole(num_workers=3)
    yield served
    served.wait_until_whole(num_workers=3)


@pytest.fixture
def disaggregated_graph(_graphs: _OneAtATime, chaotic_model: Path) -> Iterator[Served]:
    """Two prefill workers and one that only denoises."""
    served = _graphs.get("disaggregated_graph", chaotic_model, DISAGGREGATED)
    served.wait_until_whole(num_workers=3)
    yield served
    served.wait_until_whole(num_workers=3)


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference(MODEL)


@pytest.fixture(scope="session")
def chaotic_reference(chaotic_model: Path) -> Reference:
    return Reference(chaotic_model)
