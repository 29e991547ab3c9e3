"""Puts load on an OpenAI endpoint and measures what its users would see: `python -m benchmarks.load_generator`.

Open loop: requests are sent when they are due, whether or not earlier ones are answered, and latency
counts from then: a server that falls behind cannot slow down its own measurement. Closed loop
(`--arrivals closed`): so many clients, each asks when its last answer has come.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks import options, progress, results
from benchmarks.client import Client, RequestFailed, first_model
from benchmarks.metrics import Objective, Outcome, summarize
from benchmarks.progress import Answered
from benchmarks.workload import Question

Ask = Callable[[int, Question, float, Callable[[], float]], Awaitable[Outcome]]
"""Index, question, when it was due, the run's clock: `Client.ask`."""


async def open_loop(ask: Ask, questions: Sequence[Question], answered: Answered = progress.ignore) -> list[Outcome]:
    """Sends every question at its arrival time; returns when all are answered or have failed."""
    now = _clock()

    async def one(index: int, question: Question) -> Outcome:
        outcome = await ask(index, question, question.arrival_s, now)
        answered(outcome)
        return outcome

    asked = []
    for index, question in enumerate(questions):
        await asyncio.sleep(max(question.arrival_s - now(), 0.0))
        asked.append(asyncio.ensure_future(one(index, question)))
    return await asyncio.gather(*asked)


async def closed_loop(
    ask: Ask, questions: Iterable[Question], num_clients: int, duration_s: float, answered: Answered = progress.ignore
) -> list[Outcome]:
    """`num_clients` clients that each ask as soon as they have an answer, for `duration_s`.

    A request is due when its client is free: what a crowd would have waited for does not show in latencies.
    """
    now = _clock()
    numbered = enumerate(questions)
    outcomes: list[Outcome] = []

    async def one_client() -> None:
        for index, question in numbered:
            if (due_s := now()) >= duration_s:
                return
            outcome = await ask(index, question, due_s, now)
            answered(outcome)
            outcomes.append(outcome)
            if outcome.error:
                await asyncio.sleep(0.1)  # a server that refuses at once is not to be asked at full speed

    await asyncio.gather(*(one_client() for _ in range(num_clients)))
    return sorted(outcomes, key=lambda outcome: outcome.index)


def _clock() -> Callable[[], float]:
    started = time.perf_counter()
    return lambda: time.perf_counter() - started


async def warm_up(ask: Ask, questions: Iterator[Question], count: int, num_clients: int = 4) -> None:
    """`count` requests whose outcomes nobody looks at."""
    await closed_loop(ask, itertools.islice(questions, count), num_clients, float("inf"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--model", help="which of its models (default: the first)")
    parser.add_argument("--duration-s", type=float, default=30.0, help="requests are due for so long (%(default)s)")
    parser.add_argument("--rate", type=float, help="mean requests per second (10; a replay: its own)")
    parser.add_argument("--warm-up", type=int, default=8, metavar="N", help="requests before, not counted")
    parser.add_argument("--out", type=Path, metavar="DIR", help="writes summary.json and requests.csv there")
    options.add_arrivals(parser)
    options.add_workload(parser)
    options.add_client(parser)
    arguments = parser.parse_args(argv)
    try:
        return asyncio.run(_run(arguments))
    except (RequestFailed, ValueError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


async def _run(arguments: argparse.Namespace) -> int:
    model = arguments.model or await first_model(arguments.url)
    duration_s: float = arguments.duration_s
    questions = options.questions(arguments, arguments.seed)
    due = [] if arguments.arrivals == "closed" else options.due(arguments, arguments.rate, arguments.seed)
    decoding = options.decoding(arguments)
    cpu_s = time.process_time()
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(arguments.url, model, decoding, arguments.timeout_s))
        await warm_up(client.ask, options.questions(arguments, arguments.seed + 1), arguments.warm_up)
        answered = stack.enter_context(progress.bar(len(due) or None, arguments.url))
        if arguments.arrivals == "closed":
            outcomes = await closed_loop(client.ask, questions, arguments.clients, duration_s, answered)
        else:
            outcomes = await open_loop(client.ask, due, answered)
    objective = Objective(arguments.slo_s, arguments.slo_first_token_s)
    summary = summarize(outcomes, duration_s, objective)
    cpu_s = time.process_time() - cpu_s
    setup = options.setup(arguments) | {"model": model, "mode": decoding.mode, "client_cpu_s": round(cpu_s, 2)}
    results.print_summary(summary, setup)
    if arguments.out:
        results.write_run(arguments.out, setup, summary, outcomes)
    return 0 if summary.num_completed and not summary.errors else 1


if __name__ == "__main__":
    sys.exit(main())
