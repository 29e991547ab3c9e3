"""Prefill workers, KV over NIXL between processes, overflow: the same tokens by every way through a graph."""

from __future__ import annotations

import csv
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator.denoising import Recorded
from tests.e2e.conftest import HYBRID, WORKER_TIMEOUT_S
from tests.e2e.questions import Question, mixed
from tests.e2e.reference import Reference
from tests.e2e.served import SLOW, Served, is_alive, together, wait_until

pytestmark = pytest.mark.e2e

SLOWLY: dict[str, Any] = {"unmasking": "quota", "steps_per_block": 32}


def ask_all(graph: Served, reference: Reference, count: int = 200) -> None:
    questions = mixed(count // 2) * 2
    expected = [question.expected(reference) for question in questions]
    assert together(*(question.by_http(graph) for question in questions)) == expected


def test_200_at_once_through_colocated_workers(chaotic_graph: Served, chaotic_reference: Reference) -> None:
    ask_all(chaotic_graph, chaotic_reference)
    assert chaotic_graph.total("transfers_total") == 0


def test_200_at_once_through_prefill_workers_and_a_decode_worker(
    disaggregated_graph: Served, chaotic_reference: Reference
) -> None:
    graph = disaggregated_graph
    ask_all(graph, chaotic_reference)
    assert graph.total("num_prefill_tokens_total", "colocated_worker") == 0
    assert graph.total("num_refresh_tokens_total", "colocated_worker") > 0, "in the middle of blocks, in their place"
    assert graph.total("num_refresh_tokens_total", "prefill_worker") == 0
    assert graph.total("num_denoising_tokens_total", "prefill_worker") == 0
    assert graph.total("transfers_total") >= 200
    assert graph.total("failed_transfers_total") == 0
    router = graph.metrics("router")
    assert router["sangam_router_overflows_total"] == 0 and router["sangam_router_retries"] == 0
    assert router['sangam_router_prefills_total{cause="refresh",route="prefill"}'] > 100
    for worker in graph.workers("prefill_worker"):
        assert graph.metrics(worker)["sangam_worker_num_prefill_tokens_total"] > 0, "both have worked"


def test_forwards_per_block_are_written_down(hybrid_graph: Served, chaotic_reference: Reference) -> None:
    """Of blocks that two workers have shared, too; as the simulator reads them."""
    question = Question("count from 5 to 70", 100, {"confidence_threshold": 0.3})
    expected = question.expected(chaotic_reference)
    num_answers = 4
    assert together(*[question.by_http(hybrid_graph)] * num_answers) == [expected] * num_answers

    def of_requests() -> list[list[int]]:
        with hybrid_graph.steps_file.open(newline="") as file:
            rows = list(csv.DictReader(file))
        return [
            [int(row["num_steps"]) for row in group] for _, group in itertools.groupby(rows, lambda row: row["request"])
        ]

    wait_until(lambda: len(of_requests()) >= num_answers, "the last answer's row")
    *_, last = recorded = of_requests()[-num_answers:]
    num_steps = chaotic_reference.chat("count from 5 to 70", 100, confidence_threshold=0.3).num_steps
    assert recorded == [last] * num_answers and len(last) == 4 and sum(last) == num_steps
    assert len(set(last)) > 1, "a model that takes the same for each would show nothing"
    assert list(Recorded(hybrid_graph.steps_file).draw(1, 0, 4, 32))


def test_kv_that_the_next_step_computes_anew_is_not_read(
    disaggregated_graph: Served, chaotic_reference: Reference
) -> None:
    """Of its pages one is, so that the prefill worker hears that it may free all of them."""
    num_bytes = []
    for policy in ("dual", "none", "dual"):
        question = Question("count from 5 to 70", 32, {"cache_policy": policy, **SLOWLY})
        assert question.by_http(disaggregated_graph)() == question.expected(chaotic_reference)
        time.sleep(0.5)  # workers bring their totals up to date several times a second
        num_bytes.append(disaggregated_graph.total("transfer_bytes_total"))
    one, all_of_them = (after - before for before, after in itertools.pairwise(num_bytes))
    num_tokens = chaotic_reference.chat("count from 5 to 70", 32, **SLOWLY).num_prompt_tokens + 32
    assert all_of_them == one * -(-num_tokens // 16) > 0


def test_200_at_once_with_overflow(hybrid_graph: Served, chaotic_reference: Reference) -> None:
    graph = hybrid_graph
    # What is placed before the prefill worker is known goes to colocated workers, and does not overflow.
    before = _on_colocated_workers(graph) - graph.metrics("router")["sangam_router_overflows_total"]
    ask_all(graph, chaotic_reference)
    router = graph.metrics("router")
    overflows = router["sangam_router_overflows_total"]
    assert overflows > 10 and graph.total("transfers_total") > 50
    assert router["sangam_router_retries"] == 0 and graph.total("failed_transfers_total") == 0
    assert _on_colocated_workers(graph) - overflows == before
    assert router['sangam_router_phase_seconds_count{phase="transfer"}'] >= 200
    assert graph.total("transfer_bytes_total") > 0 and graph.total("transfer_seconds_total") > 0


def _on_colocated_workers(graph: Served) -> float:
    """How many prefills the router has placed there."""
    prefills = "sangam_router_prefills_total"
    routed = graph.metrics("router").items()
    return sum(value for key, value in routed if key.startswith(prefills) and 'route="colocated"' in key)


def slow(graph: Served, reference: Reference, prompt: str, num_tokens: int = 160) -> Callable[[], None]:
    """Asks for seconds of work, and checks the answer."""

    def run() -> None:
        expected = reference.chat(prompt, num_tokens, ignore_eos=True, **SLOWLY)
        with graph.stream(prompt, num_tokens, ignore_eos=True, nvext=SLOW) as stream:
            stream.read_all()
        assert not stream.errors
        assert (stream.text, stream.finish_reason) == (expected.text, "length")

    return run


def crowd(graph: Served, reference: Reference, count: int = 12) -> list[Callable[[], None]]:
    prompts = [f"count from {i} to {i + 60}" for i in range(count)]
    for prompt in prompts:  # computed before anyone is in a hurry
        reference.chat(prompt, 160, ignore_eos=True, **SLOWLY)
    return [slow(graph, reference, prompt) for prompt in prompts]


def retries(graph: Served) -> float:
    return graph.metrics("router").get("sangam_router_retries", 0)


@pytest.mark.parametrize("victim", ["prefill_worker.0", "colocated_worker.1"])
def test_a_worker_killed_under_load(disaggregated_or_hybrid: Served, chaotic_reference: Reference, victim: str) -> None:
    graph = disaggregated_or_hybrid
    if victim not in graph.workers():
        victim = "colocated_worker.0"
    pids: list[int] = []

    def kill() -> None:
        wait_until(lambda: graph.metrics(victim).get("sangam_worker_num_steps_total", 0) > before, "work")
        pids.append(graph.kill(victim))

    before = graph.metrics(victim)["sangam_worker_num_steps_total"]
    together(kill, *crowd(graph, chaotic_reference))
    wait_until(lambda: graph.pid(victim) not in (None, *pids), f"{victim} to be restarted")
    graph.wait_until_whole(num_workers=3)
    transfers = graph.total("transfers_total")
    together(*crowd(graph, chaotic_reference, 4))
    assert graph.total("transfers_total") > transfers, "KV moves again"


@pytest.fixture(params=["hybrid_graph", "disaggregated_graph"])
def disaggregated_or_hybrid(request: pytest.FixtureRequest) -> Served:
    served: Served = request.getfixturevalue(request.param)
    return served


@pytest.mark.parametrize("victim", ["prefill_worker.0", "colocated_worker.0"])
def test_a_worker_that_hangs_is_given_up_and_its_late_messages_change_nothing(
    hybrid_graph: Served, chaotic_reference: Reference, victim: str
) -> None:
    graph = hybrid_graph

    def stop() -> None:
        wait_until(lambda: graph.metrics(victim).get("sangam_worker_num_steps_total", 0) > before, "work")
        pid = graph.kill(victim, signal.SIGSTOP)
        try:
            stopped = time.monotonic()
            wait_until(lambda: graph.metrics("router").get("sangam_router_workers") == 2, "the router to notice")
            assert time.monotonic() - stopped < WORKER_TIMEOUT_S + 5.0
        finally:
            os.kill(pid, signal.SIGCONT)

    before = graph.metrics(victim)["sangam_worker_num_steps_total"]
    together(stop, *crowd(graph, chaotic_reference))
    graph.wait_until_whole(num_workers=3)
    together(*crowd(graph, chaotic_reference, 4))


def test_clients_that_leave_free_both_sides(hybrid_graph: Served) -> None:
    rng = random.Random("leave")
    options: dict[str, Any] = {"ignore_eos": True, "nvext": SLOW}

    def client(seconds: float) -> Callable[[], None]:
        def run() -> None:
            with hybrid_graph.stream("count from 5 to 70", 256, **options) as stream:
                deadline = time.monotonic() + seconds
                while time.monotonic() < deadline and stream.read():
                    pass

        return run

    together(*(client(rng.uniform(0, 0.6)) for _ in range(24)))
    hybrid_graph.wait_until_whole(num_workers=3)


def drain(graph: Served, worker: str) -> subprocess.CompletedProcess[str]:
    port = graph.url.rpartition(":")[2]
    command = [sys.executable, "-m", "graphs", "drain", worker, "--http-port", port]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=graph.environment)


def test_workers_drained_under_load_leave_and_nobody_notices(
    tmp_path: Path, chaotic_model: Path, chaotic_reference: Reference
) -> None:
    graph = Served(tmp_path, chaotic_model, *HYBRID)
    try:
        graph.wait_until_ready()
        graph.wait_until_whole(num_workers=3)
        for num_left, worker in ((2, "colocated_worker.1"), (1, "prefill_worker.0")):
            pid = graph.pid(worker)
            assert pid is not None
            results: list[subprocess.CompletedProcess[str]] = []

            def leave(worker: str = worker, results: list[Any] = results) -> None:
                wait_until(lambda: graph.metrics(worker).get("sangam_worker_num_steps_total", 0) > 3, "work")
                results.append(drain(graph, worker))

            together(leave, *crowd(graph, chaotic_reference))
            assert results[0].returncode == 0, results[0].stdout + results[0].stderr
            assert not is_alive(pid)
            wait_until(lambda n=num_left: graph.metrics("router").get("sangam_router_workers") == n, "it to be gone")  # type: ignore[misc]
        time.sleep(2.0)  # longer than the supervisor takes to start a process again
        assert graph.pid("prefill_worker.0") is None and graph.pid("colocated_worker.1") is None
        together(*crowd(graph, chaotic_reference, 4))
        assert retries(graph) == 0, "drained means that nothing was lost"
        assert drain(graph, "prefill_worker.0").returncode == 2
    finally:
        graph.stop(num_processes=5)
