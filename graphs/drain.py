"""Takes a worker out of a running graph: it gets no more blocks, finishes those it has, and leaves for good."""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from rich.console import Console

from graphs import state
from graphs.state import RunningGraph

INTERVAL_S = 0.2


class NotDrainable(ValueError):
    """There is no such worker; the message says what there is."""


class DrainFailed(RuntimeError):
    """The worker did not leave, or not as told."""


@dataclass(frozen=True)
class Worker:
    """A worker to drain; `graph` is the one on this machine that it belongs to, if there is one."""

    name: str
    status_url: str
    graph: RunningGraph | None = None

    def __str__(self) -> str:
        return f"{self.name} at {self.status_url}" if self.graph else self.status_url


def add_arguments(parser: argparse.ArgumentParser, graphs: Collection[str]) -> None:
    parser.add_argument(
        "worker",
        metavar="WORKER",
        help="its name as `sangam serve` prints it, or the URL of its status port on any machine",
    )
    parser.add_argument("--http-port", type=int, metavar="PORT", help="which of this machine's graphs, by its API")
    parser.add_argument("--graph", choices=graphs, help="which of this machine's graphs, by its kind")
    parser.add_argument("--no-wait", action="store_true", help="return as soon as the worker knows")
    parser.add_argument(
        "--timeout-s", type=float, default=120.0, metavar="S", help="how long to wait (default: %(default)g)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Drains one worker; the exit status.

    0: it has left (with --no-wait: it was told to). 1: it did not. 2: there is no such worker.
    """
    name = arguments.worker
    try:
        worker = find(name, arguments.graph, arguments.http_port, state.running())
        name = worker.name
        started = time.monotonic()
        tell(worker)
        if arguments.no_wait:
            print(f"✓ {name} drains")
        else:
            wait(worker, arguments.timeout_s)
            print(f"✓ {name} drained and left {time.monotonic() - started:.1f} s")
        return 0
    except (NotDrainable, DrainFailed) as error:
        print(f"sangam drain: {error}", file=sys.stderr)
        return 2 if isinstance(error, NotDrainable) else 1
    except KeyboardInterrupt:
        print(f"sangam drain: {name} goes on draining", file=sys.stderr)
        return 130


def find(worker: str, graph: str | None, http_port: int | None, running: Sequence[RunningGraph]) -> Worker:
    """The worker that is meant.

    Args:
        graph, http_port: only graphs of this kind, or with this port.
        running: the graphs of this machine.

    Raises:
        NotDrainable: none is, or several are, or it is no worker.
    """
    url = _status_url(worker)
    if url:
        here = [(g, name) for g in running for name, process in g.processes.items() if process.status_url == url]
        return _checked(*here[0]) if here else Worker(url, url)
    if not running:
        raise NotDrainable("no graph is up on this machine; on another, name the URL of the worker's status port")
    chosen = [g for g in running if graph in (None, g.graph) and http_port in (None, g.http_port)]
    if not chosen:
        raise NotDrainable(f"there is no such graph; on this machine run {_listed(running)}")
    owners = [g for g in chosen if worker in g.processes]
    if not owners:
        known = (f"{g} has {', '.join(g.workers) or 'no workers left'}" for g in chosen)
        raise NotDrainable(f"there is no {worker}: {'; '.join(known)}")
    if len(owners) > 1:
        raise NotDrainable(f"several graphs have a {worker}, choose one: {_listed(owners)}")
    return _checked(owners[0], worker)


def tell(worker: Worker) -> None:
    """Has the worker begin to drain; to say it again does no harm.

    Raises:
        NotDrainable: what answers there is no worker.
        DrainFailed: nothing answers, or it refuses.
    """
    import httpx2

    url = f"{worker.status_url}/engine/drain"
    try:
        reply = httpx2.post(url, json={}, trust_env=False, timeout=10.0)
    except (httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
        raise NotDrainable(f"{worker.name} is no URL: {error}") from None
    except (httpx2.ReadError, httpx2.RemoteProtocolError):
        return  # an idle worker may be gone before its answer is out; whether it is, the wait will tell
    except httpx2.TransportError as error:
        raise DrainFailed(f"{worker} does not answer: {error}") from None
    if reply.status_code in (404, 405):
        raise NotDrainable(f"what answers at {worker.status_url} is no worker: it knows no /engine/drain")
    if not reply.is_success:
        raise DrainFailed(f"{worker.name} refuses: HTTP {reply.status_code} {reply.text.strip()[:500]}")


def wait(worker: Worker, timeout_s: float) -> None:
    """Waits until the worker has left.

    Raises:
        DrainFailed: it is still there, or died instead.
    """
    clock, was_silent = time.monotonic, False
    started = clock()
    with Console().status(f"{worker.name} drains") as status:
        while (elapsed_s := clock() - started) <= timeout_s:
            is_silent = _is_silent(worker.status_url)
            if worker.graph is None:
                if is_silent:
                    return
            # The port closes as soon as a process begins to end: that it has ended well, its supervisor knows.
            elif not worker.graph.still_has(worker.name):
                return
            elif was_silent and not is_silent:
                raise DrainFailed(f"{worker.name} died before it was done, and was started again")
            was_silent = is_silent
            status.update(f"{worker.name} drains, {elapsed_s:.0f} s")
            time.sleep(INTERVAL_S)
    raise DrainFailed(f"{worker.name} has not left after {timeout_s:g} s; it goes on draining")


def _status_url(worker: str) -> str:
    """The URL, if it is one, without a path that it may have been copied with; names have no colon."""
    if ":" not in worker:
        return ""
    try:
        address = urlsplit(worker if "//" in worker else f"http://{worker}")
        _ = address.port  # whether it is a number is not looked at before
    except ValueError as error:
        raise NotDrainable(f"{worker} is no URL: {error}") from None
    return f"{address.scheme}://{address.netloc}"


def _checked(graph: RunningGraph, name: str) -> Worker:
    process = graph.processes[name]
    if not process.may_leave:
        raise NotDrainable(f"{name} cannot be drained, only workers can: {', '.join(graph.workers)}")
    return Worker(name, process.status_url, graph)


def _listed(graphs: Sequence[RunningGraph]) -> str:
    return ", ".join(str(graph) for graph in graphs)


def _is_silent(status_url: str) -> bool:
    """Whether nobody listens there; one who does not answer in time, or a network that fails, is no proof of it."""
    address = urlsplit(status_url)
    try:
        socket.create_connection((address.hostname or "", address.port or 80), timeout=5.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False
