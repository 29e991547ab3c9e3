from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from components.config import (
    DEMO_MODELS,
    SECTIONS,
    ColocatedWorkerConfig,
    ConfigError,
    RouterConfig,
    WorkerConfig,
    add_flags,
    from_command_line,
    load,
)

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "graph.yaml"
    path.write_text("common:\n  namespace: here\nrouter:\n  max_attempts: 7\ncolocated_worker:\n  token_budget: 99\n")
    return path


@pytest.mark.parametrize("section", SECTIONS)
def test_defaults_are_a_configuration(section: str) -> None:
    assert load(section, None) == SECTIONS[section]()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("section", SECTIONS)
def test_the_projects_own_files_load(path: Path, section: str) -> None:
    load(section, path)


def test_common_keys_reach_each_section_and_its_own_win(graph: Path) -> None:
    router, worker = load("router", graph), load("colocated_worker", graph)
    assert isinstance(router, RouterConfig) and isinstance(worker, WorkerConfig)
    assert router.namespace == worker.namespace == "here"
    assert (router.max_attempts, worker.token_budget) == (7, 99)
    graph.write_text(graph.read_text().replace("router:", "router:\n  namespace: there"))
    assert load("router", graph).namespace == "there"


@pytest.mark.parametrize("given", ["auto", "64"])
def test_a_token_budget_is_a_number_or_auto(given: str, tmp_path: Path) -> None:
    meant = int(given) if given.isdigit() else given
    path = tmp_path / "graph.yaml"
    path.write_text(f"colocated_worker: {{token_budget: {given}}}\n")
    worker = load("colocated_worker", path)
    assert isinstance(worker, ColocatedWorkerConfig) and worker.token_budget == meant
    assert from_command_line("colocated_worker", ColocatedWorkerConfig, ["--token-budget", given]) == worker


@pytest.mark.parametrize("given", ["auto", "64", "inf"])
def test_an_overflow_threshold_is_a_number_or_auto(given: str) -> None:
    config = from_command_line("router", RouterConfig, ["--overflow-threshold", given])
    assert config.overflow_threshold == (given if given == "auto" else float(given))


@pytest.mark.parametrize("wrong", ["0", "automatic", "1.5"])
def test_a_token_budget_that_is_neither(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(f"colocated_worker: {{token_budget: {wrong}}}\n")
    with pytest.raises(ConfigError, match="colocated_worker.token_budget: "):
        load("colocated_worker", path)


def test_a_common_key_that_only_some_sections_know(graph: Path) -> None:
    graph.write_text("common: {token_budget: 5}\n")
    worker = load("colocated_worker", graph)
    assert isinstance(worker, WorkerConfig) and worker.token_budget == 5
    load("router", graph)


def test_a_flag_wins_and_an_absent_one_does_not(graph: Path) -> None:
    config = load("router", graph, {"max_attempts": 2, "namespace": None})
    assert isinstance(config, RouterConfig)
    assert (config.max_attempts, config.namespace) == (2, "here")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("router: {max_atempts: 3}", "unknown key in router: 'max_atempts'; did you mean 'max_attempts'?"),
        ("common: {tokenbudget: 3}", "unknown key in common: 'tokenbudget'; did you mean 'token_budget'?"),
        ("ruter: {}", "unknown section: 'ruter'; did you mean 'router'?"),
        ("router: {token_budget: 3}", "unknown key in router: 'token_budget'"),
        ("router: 3", "section router must hold `key: value` lines"),
        ("- 3", "expected sections"),
        ("router: {", "is not valid YAML"),
        ("router: {}\nrouter: {}", "'router' stands twice"),
        ("[" * 5000, "nested too deeply"),
        ("router: {max_attempts: 3, max_attempts: 4}", "'max_attempts' stands twice"),
        ("? [router]\n: {}", "is not valid YAML"),
        ("router: {max_attempts: 0}", "router.max_attempts: Input should be greater than or equal to 1 (got 0)"),
        ("router: {max_attempts: many}", "router.max_attempts: "),
        ("router: {request_plane: carrier}", "router.request_plane: "),
        ("router: {namespace: Big}", "router.namespace: "),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as mistake:
        load("router", path)
    assert message in str(mistake.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read .*nowhere.yaml: No such file"):
        load("router", tmp_path / "nowhere.yaml")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_bytes(b"router:\n  # \xff\n")
    with pytest.raises(ConfigError, match="graph.yaml is not UTF-8: invalid start byte at byte 12"):
        load("router", path)


def test_empty_sections_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text("common:\nrouter:\n")
    assert load("router", path) == RouterConfig()


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_a_flag(section: str) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, SECTIONS[section])
    flags = parser.parse_args([])
    assert all(value is None for value in vars(flags).values())
    assert set(vars(flags)) == {"config", *SECTIONS[section].model_fields}


def test_the_command_line(graph: Path) -> None:
    argv = ["-f", str(graph), "--max-attempts", "3", "--worker-timeout-s=0.5", "--context-length", "64"]
    config = from_command_line("router", RouterConfig, argv)
    assert (config.namespace, config.max_attempts, config.worker_timeout_s) == ("here", 3, 0.5)
    assert config.context_length == 64


@pytest.mark.parametrize("argv", [["--max-attempts", "0"], ["--max-attempts", "x"], ["--max"], ["--nonsense"]])
def test_a_mistake_on_the_command_line_ends_with_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        from_command_line("router", RouterConfig, argv)
    assert end.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_a_demonstration_model_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RouterConfig.model_validate({"model": "demo-dream"}).model == DEMO_MODELS["demo-dream"]
    assert from_command_line("router", RouterConfig, ["--model", "demo"]).model == RouterConfig().model
    (tmp_path / "demo-dream").mkdir()
    assert RouterConfig.model_validate({"model": "demo-dream"}).model.resolve() == tmp_path / "demo-dream"


def test_a_model_without_a_name_is_called_like_its_folder(tmp_path: Path) -> None:
    assert RouterConfig(model=tmp_path / "llada" / ".." / "dream").model_name == "dream"
    assert RouterConfig(model=tmp_path, served_model_name="mine").model_name == "mine"


def test_what_may_be_a_number_or_a_word_is_named_once() -> None:
    with pytest.raises(ConfigError) as raised:
        load("colocated_worker", None, {"kv_cache_tokens": 0, "token_budget": "much"})
    text = str(raised.value)
    assert text.count("kv_cache_tokens") == text.count("token_budget") == 1
    assert "greater than or equal to 1, or input should be 'auto' (got 0)" in text and "(got 'much')" in text
