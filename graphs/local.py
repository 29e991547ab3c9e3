"""Runs a graph on this machine: starts what is missing, waits until the model answers, keeps it running."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.config import ConfigError, RouterConfig, WorkerConfig
from graphs import discovery, gpus, readiness, state
from graphs.follower import Follower
from graphs.launch import Settings, nats_program, stages
from graphs.ports import PortTaken, free_ports, require_free
from graphs.program import Program
from graphs.supervisor import ChildFailed, Supervisor
from graphs.terminal import Terminal

NATS_PORT = 4222
NATS_START_S, NATS_REACH_S = 10.0, 2.0


def default_log_dir(settings: Settings) -> Path:
    """Where logs go: one folder per graph and port, overwritten by the next run."""
    return state.folder() / f"{settings.graph.name}-{settings.frontend.http_port}"


def serve(settings: Settings, log_dir: Path, terminal: Terminal) -> int:
    """Runs the graph until a signal comes; the exit status.

    0: it was up and was stopped. 1: it did not come up. 2: it cannot come up as configured.
    128 + signal: it was interrupted while starting, or killed by a second signal.
    """
    try:
        check(settings)
        log_dir.mkdir(parents=True, exist_ok=True)
        for log in log_dir.glob("*.log"):
            log.unlink()
        with _discovery_dir(settings) as discovery_dir, _home() as home:
            return asyncio.run(_Run(settings, log_dir, discovery_dir, home, terminal).run())
    except (ConfigError, PortTaken) as error:
        terminal.failed(str(error))
    except OSError as error:
        terminal.failed(f"cannot write {error.filename}: {error.strerror}")
    return 2


def check(settings: Settings) -> None:
    """Finds what would make the start fail, before anything is started.

    Raises:
        ConfigError: no such model, no NATS server to run, one port for two, or sections that cannot work together.
        PortTaken: one of the frontend's ports is.
    """
    config = settings.frontend
    _check_workers(settings)
    _check_routing(settings)
    if not (config.model / "config.json").is_file():
        raise ConfigError(f"no model in {config.model} (no config.json there); choose one with --model")
    require_free(config.http_host, config.http_port, "--http-port")
    if config.grpc_port is not None:
        if config.grpc_port == config.http_port:
            raise ConfigError(
                f"--http-port and --grpc-port are both {config.http_port}; choose another for one of them"
            )
        require_free("0.0.0.0", config.grpc_port, "--grpc-port")  # Dynamo's KServe server knows no other host
    if not config.nats:
        nats_program(NATS_PORT)


def _check_workers(settings: Settings) -> None:
    workers = {name: config for name, config in settings.sections.items() if isinstance(config, WorkerConfig)}
    page_sizes = {name: config.page_size for name, config in workers.items()}
    dtypes = {name: _dtype(config) for name, config in workers.items()}
    for key, values in (("page_size", page_sizes), ("dtype", dtypes)):
        if len(set(values.values())) > 1:
            raise ConfigError(
                f"{key} must be the same for all workers, or their KV pages could not be handed over: got {values}; "
                f"set it under common: or with --{key.replace('_', '-')}"
            )


def _dtype(config: WorkerConfig) -> str:
    """What `auto` comes to where the worker runs: `device` may differ from section to section."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if gpus.runs_on_cpu(config.device) else "bfloat16"


def _check_routing(settings: Settings) -> None:
    router = settings.sections["router"]
    assert isinstance(router, RouterConfig)
    if settings.graph.may_overflow:
        return
    name = settings.graph.name
    if router.routing != "hybrid":
        raise ConfigError(
            f"router.routing {router.routing} prefills short prompts where they are denoised: serve hybrid"
        )
    theta = router.overflow_threshold if router.overflow_threshold == "auto" else f"{router.overflow_threshold:g}"
    if theta != "inf":
        raise ConfigError(
            f"with router.overflow_threshold {theta} prefills would overflow: set it to .inf "
            f"(--overflow-threshold inf) for the {name} graph, or serve hybrid"
        )


@contextlib.contextmanager
def _discovery_dir(settings: Settings) -> Iterator[str]:
    config = settings.frontend
    if config.discovery != "file":
        yield ""
    elif config.discovery_dir:
        yield str(Path(config.discovery_dir).resolve())
    else:
        with tempfile.TemporaryDirectory(prefix="sangam-discovery-", ignore_cleanup_errors=True) as directory:
            yield directory


@contextlib.contextmanager
def _home() -> Iterator[str]:
    """The user's home directory, or a private one where that cannot be written.

    Dynamo's frontend copies the tokenizer to ~/.cache/dynamo, and never serves the model where it cannot.
    """
    home = os.path.expanduser("~")
    if _can_be_written(Path(home, ".cache", "dynamo")):
        yield home
    else:
        with tempfile.TemporaryDirectory(prefix="sangam-home-", ignore_cleanup_errors=True) as directory:
            yield directory


def _can_be_written(folder: Path) -> bool:
    """Whether it is a folder to write to, made if it was not there."""
    if not folder.is_absolute():
        return False  # this user has no home
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


class _Run:
    def __init__(self, settings: Settings, log_dir: Path, discovery_dir: str, home: str, terminal: Terminal) -> None:
        self._settings, self._log_dir, self._terminal = settings, log_dir, terminal
        self._discovery_dir, self._home = discovery_dir, home
        self._state: state.StateFile | None = None

    async def run(self) -> int:
        supervisor = Supervisor(self._log_dir, self._died, on_leave=self._left)
        follower = Follower(self._log_dir, self._terminal.line)
        following = asyncio.create_task(follower.run())
        signals = _Signals(supervisor)
        starting = asyncio.ensure_future(supervisor.starting(self._start(supervisor)))
        either: set[asyncio.Future[Any]] = {starting, signals.first}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                programs = starting.result()
                self._note(programs)
                self._terminal.ready(self._settings, programs, self._log_dir)
                await signals.first
            up = starting.done()
            self._terminal.stopping(signals.first.result().name)
            starting.cancel()
            await supervisor.stop()
            follower.poll()  # last words
            return 0 if up and not signals.repeated else 128 + signals.first.result()
        except (ChildFailed, readiness.NotServing) as error:
            self._terminal.ending()
            await supervisor.stop()
            following.cancel()
            self._terminal.failed(str(error), error.log if isinstance(error, ChildFailed) else None)
            return 1
        finally:
            starting.cancel()
            await supervisor.stop()
            following.cancel()
            self._terminal.settle()
            if self._state:
                with contextlib.suppress(OSError):
                    self._state.close()

    def _note(self, programs: list[Program]) -> None:
        """Writes down what runs, for `sangam drain`."""
        processes = {program.name: state.Process(program.status_url, program.may_leave) for program in programs}
        config, graph = self._settings.frontend, self._settings.graph
        try:
            self._state = state.StateFile(state.RunningGraph(graph.name, config.http_port, os.getpid(), processes))
        except OSError as error:  # no reason to stop what runs well
            self._terminal.cannot_note(error)

    def _left(self, name: str) -> None:
        self._terminal.left(name)
        if self._state:
            try:
                self._state.forget(name)
            except OSError as error:
                self._terminal.cannot_note(error)

    def _died(self, name: str, what: str, delay_s: float) -> None:
        if name == "router" and self._discovery_dir:
            discovery.forget(self._discovery_dir, self._settings.frontend.namespace, name)
        self._terminal.died(name, what, delay_s)

    async def _start(self, supervisor: Supervisor) -> list[Program]:
        terminal, config = self._terminal, self._settings.frontend
        terminal.waiting("NATS")
        ports = free_ports(reserved={config.http_port, config.grpc_port or 0})
        nats_url = config.nats
        if not nats_url:
            port = next(ports)
            nats_url = f"nats://127.0.0.1:{port}"
            supervisor.start([nats_program(port)])
        await readiness.listening(nats_url, NATS_PORT, NATS_REACH_S if config.nats else NATS_START_S)
        terminal.reached(f"NATS at {nats_url}")

        programs: list[Program] = []
        for stage in stages(self._settings, nats_url, self._discovery_dir, self._home, ports):
            supervisor.start(stage)
            programs = [*stage, *programs]
        async with readiness.new_client() as http:
            await self._all_healthy(http, programs)
            terminal.waiting(f"model {config.model_name}")
            await readiness.answering(http, self._settings.url, config.model_name)
            terminal.reached(f"model {config.model_name} answers")
        return programs

    async def _all_healthy(self, http: readiness.Client, programs: list[Program]) -> None:
        pending = [program.name for program in programs]

        async def one(program: Program) -> None:
            await readiness.healthy(http, program.status_url)
            pending.remove(program.name)
            self._terminal.reached(program.name)
            self._terminal.waiting(f"waiting for {', '.join(pending)}")

        self._terminal.waiting(f"waiting for {', '.join(pending)}")
        await asyncio.gather(*(one(program) for program in programs))


class _Signals:
    """The first signal is a request to stop, the second kills."""

    def __init__(self, supervisor: Supervisor) -> None:
        loop = asyncio.get_running_loop()
        self._supervisor = supervisor
        self.first: asyncio.Future[signal.Signals] = loop.create_future()
        self.repeated = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
                loop.add_signal_handler(number, self._arrived, number)

    def _arrived(self, number: signal.Signals) -> None:
        if not self.first.done():
            self.first.set_result(number)
        else:
            self.repeated = True
            self._supervisor.kill()
