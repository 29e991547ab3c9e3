"""Command line of what is asked, and when: the same flags for the load generator and the sweep."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import arrivals, workload
from benchmarks.demo_model.tasks import TASKS
from benchmarks.lengths import TRACES
from benchmarks.workload import Decoding, Question

DEFAULT_RATE = 10.0
DEFAULT_BLOCK_LENGTH = 32


def add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is asked")
    group.add_argument(
        "--requests",
        default="tasks",
        metavar="KIND",
        help="`tasks` of the demonstration model, whose answers are checked; `sharegpt` or `arxiv`: random token ids"
        " with the lengths of the paper's traces; or a CSV file of lengths (num_prompt_tokens,num_output_tokens)",
    )
    group.add_argument("--tasks", type=_names, default=list(TASKS), metavar="A,B", help="which tasks, in turn (all)")
    group.add_argument(
        "--list-words", type=int, default=0, metavar="N", help="lists of the task `first` have N words or more"
    )
    group.add_argument("--length-scale", type=float, default=1.0, metavar="X", help="multiplies a trace's lengths")
    group.add_argument("--max-total", type=int, metavar="N", help="leaves out a trace's longer prompt + output pairs")
    group.add_argument(
        "--token-ids", type=_ids, default=range(300, 600), metavar="LOW:HIGH", help="ids of traces' prompts (300:600)"
    )
    group.add_argument("--seed", type=int, default=1, help="of questions and arrivals (%(default)s)")
    group.add_argument(
        "--mode",
        choices=("end-of-text", "fixed-length"),
        help="where answers end; fixed-length sends ignore_eos (default: fixed-length for traces, else end-of-text)",
    )
    group.add_argument(
        "--canvas-length", type=int, metavar="N", help="masks after each prompt (default: as the trace's, scaled)"
    )
    group.add_argument("--block-length", type=int, metavar="N", help="positions denoised together")
    group.add_argument("--steps-per-block", type=int, metavar="N", help="forwards per block (`quota`); 0: `threshold`")
    group.add_argument("--confidence-threshold", type=float, metavar="P", help="of unmasking by threshold")


def add_arrivals(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("when it is asked")
    group.add_argument(
        "--arrivals",
        default="poisson",
        metavar="PROCESS",
        help="poisson, gamma, bursts, closed, or a CSV file with a column arrival_s (%(default)s)",
    )
    group.add_argument("--cv", type=float, default=2.0, help="gamma: deviation of gaps over their mean (%(default)s)")
    group.add_argument("--burst-size", type=int, default=8, metavar="N", help="bursts: requests at once (%(default)s)")
    group.add_argument("--clients", type=int, default=8, metavar="N", help="closed: how many clients (%(default)s)")


def add_client(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what counts")
    group.add_argument("--slo-s", type=float, default=2.0, help="goodput: bound on end-to-end latency (%(default)s)")
    group.add_argument("--slo-first-token-s", type=float, help="goodput: bound on the first tokens (none)")
    group.add_argument(
        "--timeout-s", type=float, default=120.0, help="an answer that takes longer failed (%(default)s)"
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _ids(text: str) -> range:
    low, _, high = text.partition(":")
    ids = range(int(low), int(high))
    if not ids or ids[0] < 0:
        raise argparse.ArgumentTypeError(f"expected LOW:HIGH with 0 <= LOW < HIGH, got {text}")
    return ids


def questions(arguments: argparse.Namespace, seed: int) -> Iterator[Question]:
    """The endless questions that were asked for.

    Raises:
        ValueError: see `workload.demo_tasks` and `workload.traced`.
        OSError: a file cannot be read.
    """
    if arguments.requests == "tasks":
        return workload.demo_tasks(arguments.tasks, seed, list_words=arguments.list_words)
    return workload.traced(
        arguments.requests, seed, arguments.token_ids, scale=arguments.length_scale, max_total=arguments.max_total
    )


def decoding(arguments: argparse.Namespace) -> Decoding:
    mode = arguments.mode or ("end-of-text" if arguments.requests == "tasks" else "fixed-length")
    canvas_length = arguments.canvas_length
    if canvas_length is None and arguments.requests in TRACES:
        block_length = arguments.block_length or DEFAULT_BLOCK_LENGTH
        wanted = TRACES[arguments.requests].canvas_length * arguments.length_scale
        canvas_length = int(-(-wanted // block_length)) * block_length
    return Decoding(
        mode == "fixed-length",
        canvas_length,
        arguments.block_length,
        arguments.steps_per_block or None,
        arguments.confidence_threshold,
    )


def due(arguments: argparse.Namespace, given_rate: float | None, seed: int) -> list[Question]:
    """The questions of an open loop with their arrival times, all before `duration_s`.

    Args:
        given_rate: requests per second; None: a replay's own, else `DEFAULT_RATE`.

    Raises:
        ValueError: a rate, cv or burst size that is none, or see `questions`.
        OSError: a file cannot be read.
    """
    times: Iterator[float] | list[float]
    rate = DEFAULT_RATE if given_rate is None else given_rate
    if arguments.arrivals == "poisson":
        times = arrivals.poisson(rate, seed)
    elif arguments.arrivals == "gamma":
        times = arrivals.gamma(rate, arguments.cv, seed)
    elif arguments.arrivals == "bursts":
        times = arrivals.bursts(rate, arguments.burst_size, seed)
    else:
        times = arrivals.replay(Path(arguments.arrivals), given_rate)
    return workload.at(arrivals.within(times, arguments.duration_s), questions(arguments, seed))


def setup(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options as they go into results, without where those are written."""
    values = {key: value for key, value in vars(arguments).items() if value is not None and key != "out"}
    return {key: value if isinstance(value, int | float | str | list) else str(value) for key, value in values.items()}
