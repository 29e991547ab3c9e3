from __future__ import annotations

import asyncio
import csv
import itertools
import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from benchmarks.client import Client
from benchmarks.load_generator import closed_loop, main, open_loop
from benchmarks.metrics import Outcome
from benchmarks.workload import Decoding, Question
from tests.benchmarks.fake_openai import FakeOpenAI


def against(server: FakeOpenAI, load: Callable[[Client], Coroutine[Any, Any, list[Outcome]]]) -> list[Outcome]:
    async def run() -> list[Outcome]:
        async with server.running() as url, Client(url, "fake", Decoding()) as client:
            return await load(client)

    return asyncio.run(run())


def questions(*times: float) -> list[Question]:
    return [Question("pieces 1", 32, "any", arrival_s=time) for time in times]


def test_an_open_loop_does_not_wait_for_answers() -> None:
    outcomes = against(FakeOpenAI(delay_s=0.3), lambda client: open_loop(client.ask, questions(0.0, 0.02, 0.04, 0.06)))
    assert [outcome.intended_s for outcome in outcomes] == [0.0, 0.02, 0.04, 0.06]
    assert max(outcome.sent_s for outcome in outcomes) < min(outcome.finished_s for outcome in outcomes)


def test_waiting_for_a_busy_server_is_part_of_the_latency() -> None:
    server = FakeOpenAI(delay_s=0.1, at_once=1)
    outcomes = against(server, lambda client: open_loop(client.ask, questions(0.0, 0.0, 0.0)))
    latencies = sorted(outcome.latency_s for outcome in outcomes)
    assert latencies[0] > 0.09 and latencies[1] > 0.19 and latencies[2] > 0.29


def test_a_late_client_counts_its_own_lateness() -> None:
    async def blocking(index: int, question: Question, intended_s: float, now: Callable[[], float]) -> Outcome:
        sent_s = now()
        time.sleep(0.1)  # as a busy machine would: the next requests are sent late
        return Outcome(index, question.task, intended_s, sent_s, now())

    outcomes = asyncio.run(open_loop(blocking, questions(0.0, 0.01, 0.02)))
    assert outcomes[2].intended_s == 0.02 and outcomes[2].sent_s > 0.1
    assert outcomes[2].latency_s > 0.2


def test_a_closed_loop_has_so_many_requests_in_flight() -> None:
    in_flight, most = 0, 0

    async def counting(index: int, question: Question, intended_s: float, now: Callable[[], float]) -> Outcome:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0.02)
        in_flight -= 1
        return Outcome(index, question.task, intended_s, intended_s, now())

    outcomes = asyncio.run(closed_loop(counting, itertools.repeat(questions(0.0)[0]), 3, 0.2))
    assert most == 3
    assert len(outcomes) >= 6
    assert [outcome.index for outcome in outcomes] == list(range(len(outcomes)))
    assert all(outcome.intended_s < 0.2 for outcome in outcomes), "nothing is due after the end"


def test_a_closed_loop_ends_with_its_questions() -> None:
    outcomes = against(FakeOpenAI(), lambda client: closed_loop(client.ask, questions(0.0, 0.0), 5, 60.0))
    assert len(outcomes) == 2


def command(server: FakeOpenAI, *flags: str) -> int:
    async def run() -> int:
        async with server.running() as url:
            return await asyncio.to_thread(main, [f"--url={url}", "--warm-up=1", *flags])

    return asyncio.run(run())


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    server = FakeOpenAI()
    flags = ("--requests=sharegpt", "--length-scale=0.1", "--rate=40", "--duration-s=0.5", "--seed=3")
    assert command(server, *flags, f"--out={tmp_path / 'run'}") == 0
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    summary, setup = written["summary"], written["setup"]
    assert setup["mode"] == "fixed length" and setup["seed"] == 3 and setup["model"] == "fake"
    assert summary["num_requests"] == summary["num_completed"] == len(server.bodies) - 1 > 5
    assert summary["achieved_rate"] == summary["num_requests"] / 0.5
    assert server.bodies[-1]["nvext"]["annotations"] == ["dllm.canvas_length:128"], "1024 masks, scaled, whole blocks"
    with (tmp_path / "run" / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == summary["num_requests"]
    assert all(float(row["latency_s"]) > 0 and row["error"] == "" and row["num_tokens"] == "2" for row in rows)


def test_the_command_fails_if_requests_did(tmp_path: Path) -> None:
    # The fake server does not know the tasks of the demonstration model and takes them for `pieces 1`.
    assert command(FakeOpenAI(), "--arrivals=closed", "--clients=2", "--duration-s=0.2", "--tasks=spell") == 0
    assert command(FakeOpenAI(delay_s=1.0), "--rate=20", "--duration-s=0.2", "--timeout-s=0.1", "--warm-up=0") == 1
