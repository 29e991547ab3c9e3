"""The `sangam` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from components.config import ConfigError
from graphs import chat, drain, flags, generate, plan
from graphs.colocated import COLOCATED
from graphs.disaggregated import DISAGGREGATED
from graphs.hybrid import HYBRID

GRAPHS = {graph.name: graph for graph in (COLOCATED, DISAGGREGATED, HYBRID)}
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one `sangam` command; the exit status. A mistake in the arguments exits with 2."""
    parser = argparse.ArgumentParser(prog="sangam", description="Serving diffusion language models on Dynamo.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serve(commands.add_parser("serve", help="run a graph on this machine", description=_serve.__doc__))
    drain.add_arguments(
        commands.add_parser("drain", help="let a worker finish and leave", description=drain.__doc__), GRAPHS
    )
    chat.add_arguments(commands.add_parser("chat", help="talk to a model in the terminal", description=chat.__doc__))
    offline = commands.add_parser(
        "generate",
        help="answer a file of prompts without a server",
        description=generate.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    generate.add_arguments(offline)
    planner = commands.add_parser(
        "plan",
        help="find the best configuration by simulation",
        description=plan.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_arguments(planner)
    arguments = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run(arguments)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    graphs = parser.add_subparsers(metavar="GRAPH", required=True)
    for graph in GRAPHS.values():
        # No abbreviations: --prefill is a flag of its own, and what else is short today may be ambiguous tomorrow.
        names = ", ".join(component.name for component in graph.components)
        sub = graphs.add_parser(graph.name, help=names, allow_abbrev=False)
        flags.add(sub, graph)
        sub.add_argument("--log-dir", type=Path, metavar="DIR", help="where each process's log goes")
        sub.add_argument("--verbose", action="store_true", help="show everything that the processes print")
        default = CONFIGS / f"{graph.name}.yaml"
        sub.set_defaults(run=_serve, graph=graph, config=default if default.is_file() else None)


def _serve(arguments: argparse.Namespace) -> int:
    """Starts a graph's processes (and a NATS server unless given one), waits until the model answers, and
    restarts what dies. Ctrl-C stops everything."""
    from graphs.launch import Settings
    from graphs.local import default_log_dir, serve
    from graphs.terminal import Terminal

    terminal = Terminal(arguments.verbose)
    try:
        settings = Settings(arguments.graph, arguments.config, flags.given(arguments, arguments.graph))
    except ConfigError as error:
        terminal.failed(str(error))
        return 2
    return serve(settings, arguments.log_dir or default_log_dir(settings), terminal)


if __name__ == "__main__":
    sys.exit(main())
