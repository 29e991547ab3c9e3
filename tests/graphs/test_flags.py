"""Flags that mean one section, and flags that mean all."""

from __future__ import annotations

import argparse
import math

import pytest

from components.config import SECTIONS, ConfigError, PrefillWorkerConfig, RouterConfig, WorkerConfig
from graphs import flags
from graphs.__main__ import GRAPHS
from graphs.colocated import COLOCATED
from graphs.graph import Graph
from graphs.hybrid import HYBRID
from graphs.launch import Settings


def parse(graph: Graph, *argv: str) -> Settings:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    flags.add(parser, graph)
    return Settings(graph, None, flags.given(parser.parse_args(argv), graph))


def workers(settings: Settings) -> dict[str, WorkerConfig]:
    return {name: config for name, config in settings.sections.items() if isinstance(config, WorkerConfig)}


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=lambda graph: graph.name)
def test_every_key_of_every_section_has_a_flag_and_the_help_does_not_list_it(graph: Graph) -> None:
    parser = argparse.ArgumentParser()
    flags.add(parser, graph)
    given = flags.given(parser.parse_args([]), graph)
    for component in graph.components:
        assert {f"{component.name}.{key}" for key in SECTIONS[component.name].model_fields} <= set(given)
    assert set(given.values()) == {None}
    keys = parser.format_help().partition("options:")[2].partition("sets a key of one section")[0]
    assert "--router." not in keys


def test_a_plain_flag_reaches_all_workers_and_a_section_flag_one() -> None:
    found = workers(parse(HYBRID, "--kv-cache-tokens", "4096", "--device", "cuda"))
    assert {config.kv_cache_tokens for config in found.values()} == {4096}
    found = workers(parse(HYBRID, "--prefill-worker.kv-cache-tokens", "8192", "--kv-cache-tokens", "4096"))
    assert {name: config.kv_cache_tokens for name, config in found.items()} == {
        "prefill_worker": 8192,
        "colocated_worker": 4096,
    }


def test_the_numbers_of_workers_are_told_apart() -> None:
    found = workers(parse(HYBRID, "--prefill", "3", "--colocated", "2"))
    assert (found["prefill_worker"].num_workers, found["colocated_worker"].num_workers) == (3, 2)
    for flag in ("--workers", "--colocated", "--colocated-worker.num-workers"):
        assert workers(parse(COLOCATED, flag, "4"))["colocated_worker"].num_workers == 4


@pytest.mark.parametrize("flag", ["--num-workers", "--workers"])
def test_a_number_of_workers_that_could_mean_either_is_no_flag(flag: str) -> None:
    with pytest.raises(SystemExit):
        parse(HYBRID, flag, "2")


def test_section_flags_are_checked_as_the_file_is() -> None:
    with pytest.raises(ConfigError, match="prefill_worker.page_size: Input should be a valid integer"):
        parse(HYBRID, "--prefill-worker.page-size", "many")
    with pytest.raises(ConfigError, match="router.routing: Input should be 'hybrid' or 'conditional'"):
        parse(HYBRID, "--router.routing", "random")
    with pytest.raises(ConfigError, match="namespace must be the same for every process"):
        parse(HYBRID, "--router.namespace", "other")


def test_section_flags_have_their_types() -> None:
    settings = parse(
        HYBRID, "--router.overflow-threshold=inf", "--router.context-length=64", "--prefill-worker.kv-lease-s=0.5"
    )
    router, prefill = settings.sections["router"], settings.sections["prefill_worker"]
    assert isinstance(router, RouterConfig) and isinstance(prefill, PrefillWorkerConfig)
    assert math.isinf(router.overflow_threshold) and router.context_length == 64
    assert prefill.kv_lease_s == 0.5
