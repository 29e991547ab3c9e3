"""Answer a file of prompts without a server: JSONL in, JSONL out, in order of completion.

A line of INPUT is {"prompt": TEXT or token ids} or {"messages": [...]}, with a custom_id and options beside it, or a
line of OpenAI's batch format; in a .txt file it is one user message. The same command again goes on where a run ended.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from components.config import ColocatedWorkerConfig, ConfigError, RouterConfig, add_flag, load
from graphs import gpus, sampling_flags

MODULE = "components.generate"
"""A string: graphs import no engine."""
WORKER_KEYS = (
    "model", "device", "dtype", "num_threads", "kv_cache_tokens", "page_size", "token_budget", "attention_backend",
    "gpu_memory_utilization", "async_scheduling", "enforce_eager",
)  # fmt: skip
# On a GPU whose pool takes what the largest step leaves, so that has to have a size. More make no step faster.
AUTO_NUM_SEQS_ON_GPU = 256
ROUTER_KEYS = ("context_length", "default_canvas_length")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="INPUT", help="a .jsonl or .txt file, or - for JSONL from stdin")
    parser.add_argument("output", metavar="OUTPUT", help="where answers are appended, or - for stdout")
    engine = parser.add_argument_group("the engine")
    for key in WORKER_KEYS:
        add_flag(engine, ColocatedWorkerConfig, key)
    for key in ROUTER_KEYS:
        add_flag(engine, RouterConfig, key)
    engine.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="requests in flight at once (default: as many as pages allow)"
    )
    options = parser.add_argument_group("options of lines that do not name them")
    names = sampling_flags.add(options)
    options.add_argument("--stop", action="append", metavar="TEXT", help="ends an answer; may be given several times")
    options.add_argument("--ignore-eos", action="store_const", const=True, help="answers of exactly --max-tokens")
    parser.set_defaults(run=run, option_names=(*names, "stop", "ignore_eos"))


def run(arguments: argparse.Namespace) -> int:
    """Answers the file; the exit status (see `components.generate.run`)."""
    given = vars(arguments)
    try:
        worker = load(
            "colocated_worker", None, {key: given[key] for key in (*WORKER_KEYS, "max_num_seqs", "context_length")}
        )
        router = load("router", None, {key: given[key] for key in ROUTER_KEYS})
    except ConfigError as error:
        print(f"sangam generate: {error}", file=sys.stderr)
        return 2
    assert isinstance(worker, ColocatedWorkerConfig)
    if arguments.max_num_seqs is None:
        worker = worker.model_copy(update={"max_num_seqs": _num_seqs(worker)})
    options = {name: given[name] for name in arguments.option_names if given[name] is not None}
    status: int = importlib.import_module(MODULE).run(arguments.input, arguments.output, worker, router, options)
    return status


def _num_seqs(worker: ColocatedWorkerConfig) -> int:
    """So many that pages are the only bound, where they may be."""
    if worker.kv_cache_tokens != "auto":
        return worker.kv_cache_tokens
    return sys.maxsize if gpus.runs_on_cpu(worker.device) else AUTO_NUM_SEQS_ON_GPU
