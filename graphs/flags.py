"""The flags of `sangam serve GRAPH`: every key, for all sections that know it or for one of them."""

from __future__ import annotations

import argparse
from typing import Any

from pydantic import create_model

from components import config
from components.config import SECTIONS, CommonConfig
from graphs.graph import Graph


def add(parser: argparse.ArgumentParser, graph: Graph) -> None:
    """Adds `--KEY` (where it means one thing), `--SECTION.KEY` and the short names of how many workers there are.

    `--SECTION.KEY` is parsed to the name SECTION.KEY, its value to a string: its section's schema checks it.
    """
    config.add_flags(parser, _plain(graph))
    for component in graph.components:
        section = component.name
        for key in SECTIONS[section].model_fields:
            # Not in --help, where each key would stand twice or more often: the epilogue has the rule.
            parser.add_argument(_dashed(f"{section}.{key}"), dest=f"{section}.{key}", help=argparse.SUPPRESS)
        if component.flags:
            parser.add_argument(
                *component.flags,
                dest=f"{section}.{component.replicas}",
                type=int,
                metavar="N",
                help=f"how many {section} processes to start",
            )
    sections = [component.name for component in graph.components]
    parser.epilog = (
        f"{_dashed(sections[-1])}.device cuda sets a key of one section alone, and so for every key of the sections "
        f"{', '.join(sections)}. Such a flag wins over one without a section, and both win over the file. "
        f"A default is what a key is that the file, configs/{graph.name}.yaml if no other, does not name."
    )


def given(arguments: argparse.Namespace, graph: Graph) -> dict[str, Any]:
    """Of what was parsed, the values of `add`'s flags: KEY or SECTION.KEY -> value, None if it was not given."""
    plain = _plain(graph).model_fields
    return {name: value for name, value in vars(arguments).items() if name in plain or "." in name}


def _plain(graph: Graph) -> type[CommonConfig]:
    """One schema with the keys of all sections, without those that never mean the same in two of them."""
    numbers = {component.replicas for component in graph.components}
    fields: dict[str, Any] = {}
    for component in graph.components:
        for key, field in SECTIONS[component.name].model_fields.items():
            if key not in numbers:
                fields.setdefault(key, (field.annotation, field))
    return create_model(f"{graph.name.title()}Flags", __base__=CommonConfig, **fields)


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"
