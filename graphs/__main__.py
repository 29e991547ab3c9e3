"""The `sangam` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import create_model

from components.config import SECTIONS, CommonConfig, ConfigError, add_flags
from graphs import chat
from graphs.colocated import COLOCATED
from graphs.graph import Graph

GRAPHS = {graph.name: graph for graph in (COLOCATED,)}
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one `sangam` command; the exit status. A mistake in the arguments exits with 2."""
    parser = argparse.ArgumentParser(prog="sangam", description="Serving diffusion language models on Dynamo.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serve(commands.add_parser("serve", help="run a graph on this machine", description=_serve.__doc__))
    chat.add_arguments(commands.add_parser("chat", help="talk to a model in the terminal", description=chat.__doc__))
    arguments = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run(arguments)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    graphs = parser.add_subparsers(metavar="GRAPH", required=True)
    for graph in GRAPHS.values():
        sub = graphs.add_parser(graph.name, help=", ".join(c.name for c in graph.components))
        add_flags(sub, _flags_schema(graph))
        sub.add_argument("--workers", dest="num_workers", type=int, metavar="N", help="short for --num-workers")
        sub.add_argument("--log-dir", type=Path, metavar="DIR", help="where each process's log goes")
        sub.add_argument("--verbose", action="store_true", help="show everything that the processes print")
        default = CONFIGS / f"{graph.name}.yaml"
        sub.set_defaults(run=_serve, graph=graph, config=default if default.is_file() else None)


def _flags_schema(graph: Graph) -> type[CommonConfig]:
    """One schema with the keys of all the graph's sections; a flag reaches each section that knows it."""
    sections = tuple(SECTIONS[component.name] for component in graph.components)
    return create_model(f"{graph.name.title()}Flags", __base__=sections)


def _serve(arguments: argparse.Namespace) -> int:
    """Starts a graph's processes (and a NATS server unless given one), waits until the model answers, and
    restarts what dies. Ctrl-C stops everything."""
    from graphs.launch import Settings
    from graphs.local import default_log_dir, serve
    from graphs.terminal import Terminal

    terminal = Terminal(arguments.verbose)
    flags = {key: value for key, value in vars(arguments).items() if key in _flags_schema(arguments.graph).model_fields}
    try:
        settings = Settings(arguments.graph, arguments.config, flags)
    except ConfigError as error:
        terminal.failed(str(error))
        return 2
    return serve(settings, arguments.log_dir or default_log_dir(settings), terminal)


if __name__ == "__main__":
    sys.exit(main())
