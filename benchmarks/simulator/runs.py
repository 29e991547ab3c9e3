"""Many simulations: in parallel, each at most once, what was run before from the disk."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile

from benchmarks import processes, progress
from benchmarks.simulator.config import SimulatorConfig
from benchmarks.simulator.graph import Graph
from benchmarks.simulator.result import Result
from benchmarks.simulator.simulate import simulate
from benchmarks.simulator.workload import Workload

_ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("backend/core", "benchmarks/simulator", "benchmarks/metrics.py")


@dataclass(frozen=True)
class Run:
    """One simulation to be run; `make_graph`: see `simulate`, its repr tells it from others."""

    config: SimulatorConfig
    workload: Workload
    make_graph: Callable[..., Graph] = Graph

    @property
    def key(self) -> str:
        """Names its result: two runs of one key are the same run of the same code."""
        variant = "" if self.make_graph is Graph else f"{self.make_graph!r} {_source(self.make_graph.__module__)}"
        return hashlib.sha256(f"{_code()} {self.config!r} {self.workload!r} {variant}".encode()).hexdigest()[:32]


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sangam" / "simulator"


def run_many(
    runs: Sequence[Run], *, num_processes: int | None = None, folder: Path | None = None, label: str = "simulating"
) -> list[Result]:
    """The results in order of `runs`, with a progress bar on a terminal.

    Args:
        num_processes: None: as many as there are processors.
        folder: of the cache; None: `default_cache()`. Whoever wants none gives a temporary one.

    Raises: see `simulate`.
    """
    folder = folder or default_cache()
    folder.mkdir(parents=True, exist_ok=True)
    keys = [run.key for run in runs]
    results = {key: result for key in set(keys) if (result := _stored(folder / f"{key}.npz")) is not None}
    missing = {key: run for key, run in zip(keys, runs, strict=True) if key not in results}
    with progress.steps(len(missing), label) as advance:
        if len(missing) == 1 or num_processes == 1:
            for key, run in missing.items():
                results[key] = _run(run, folder / f"{key}.npz")
                advance("")
        elif missing:
            with processes.pool(num_processes) as pool:
                asked = {pool.submit(_run, run, folder / f"{key}.npz"): key for key, run in missing.items()}
                for future in as_completed(asked):
                    results[asked[future]] = future.result()
                    advance("")
    return [results[key] for key in keys]


def _run(run: Run, path: Path) -> Result:
    result = simulate(run.config, run.workload, make_graph=run.make_graph)
    with NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        part = Path(file.name)
    try:
        result.save(part)
        part.replace(path)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()
    return result


def _stored(path: Path) -> Result | None:
    """What a file holds; None if there is none. A broken one is as none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return Result.load(path)
    return None


@cache
def _code() -> str:
    """A digest of all code that a result depends on."""
    digest = hashlib.sha256()
    for source in _SOURCES:
        path = _ROOT / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".yaml"):
                digest.update(f"{file.relative_to(_ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


@cache
def _source(module: str) -> str:
    return Path(str(sys.modules[module].__file__)).read_text()
