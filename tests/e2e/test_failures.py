"""Clients, workers, the router and NATS go away, each in its own way; answers do not change."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.e2e.conftest import WORKER_TIMEOUT_S
from tests.e2e.questions import Question
from tests.e2e.reference import Answer, Reference
from tests.e2e.served import SLOW, Served, is_alive, together, wait_until

pytestmark = pytest.mark.e2e

PROMPT = "count from 5 to 70"
# A step per token and every token of a long canvas: seconds of work.
NUM_TOKENS = 1024
OPTIONS: dict[str, Any] = {"ignore_eos": True, "nvext": SLOW}


@pytest.fixture
def graph(chaotic_graph: Served) -> Served:
    return chaotic_graph


@pytest.fixture(scope="module")
def reference(chaotic_reference: Reference) -> Reference:
    return chaotic_reference


@pytest.fixture(scope="module")
def expected(reference: Reference) -> Answer:
    return reference.chat(PROMPT, NUM_TOKENS, ignore_eos=True, unmasking="quota", steps_per_block=32)


def _busy(graph: Served) -> list[str]:
    """The workers that hold pages."""
    found = []
    for worker in graph.workers():
        metrics = graph.metrics(worker)
        if metrics and metrics["sangam_worker_free_pages"] < metrics["sangam_worker_num_pages"]:
            found.append(worker)
    return found


def _wait_for_busy(graph: Served) -> str:
    seen: list[str] = []  # between two blocks none has any

    def is_busy() -> bool:
        seen[:] = _busy(graph)
        return bool(seen)

    wait_until(is_busy, "a worker with work")
    return seen[0]


def _num_retries(graph: Served) -> float:
    return graph.metrics("router").get("sangam_router_retries", 0)


def _num_prefilled(graph: Served, worker: str) -> float:
    return graph.metrics(worker).get("sangam_worker_num_prefill_tokens_total", 0)


def _works_again(graph: Served, worker: str) -> None:
    """Both workers get work, `worker` among them."""
    graph.wait_until_whole(num_workers=2)
    before = _num_prefilled(graph, worker)
    together(*(lambda: graph.chat("spell lily", 32) for _ in range(8)))
    wait_until(lambda: _num_prefilled(graph, worker) > before, f"work for {worker}")


def test_a_client_that_goes_away_frees_its_pages(graph: Served) -> None:
    with graph.stream(PROMPT, NUM_TOKENS, **OPTIONS) as stream:
        stream.read_text()
        _wait_for_busy(graph)
        steps = _num_steps(graph)
    wait_until(lambda: not _busy(graph), "free pages", 5.0)
    graph.wait_until_whole(num_workers=2)
    assert _num_steps(graph) - steps < NUM_TOKENS / 2, "the work was not done to its end"


def test_a_unary_client_that_goes_away_frees_its_pages(graph: Served) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": NUM_TOKENS, **OPTIONS}
    before = _num_steps(graph)
    with pytest.raises(requests.Timeout):
        graph.post("/v1/chat/completions", body, timeout=0.5)
    wait_until(lambda: not _busy(graph), "free pages", 5.0)
    graph.wait_until_whole(num_workers=2)
    assert _num_steps(graph) - before < NUM_TOKENS / 2


def _num_steps(graph: Served) -> float:
    return sum(_num_steps_of(graph, worker) for worker in graph.workers())


def _num_steps_of(graph: Served, worker: str) -> float:
    return graph.metrics(worker).get("sangam_worker_num_steps_total", 0)


def test_clients_that_come_and_go_leave_nothing(graph: Served) -> None:
    rng = random.Random("come and go")

    def client(seconds: float) -> Callable[[], None]:
        def run() -> None:
            with graph.stream(PROMPT, 256, **OPTIONS) as stream:
                stream.read_text()
                deadline = time.monotonic() + seconds
                while time.monotonic() < deadline and stream.read():
                    pass

        return run

    together(*(client(rng.uniform(0, 0.5)) for _ in range(24)))
    graph.wait_until_whole(num_workers=2)


def test_a_killed_worker_is_not_noticed_by_its_clients(graph: Served, expected: Answer) -> None:
    retries = _num_retries(graph)
    with graph.stream(PROMPT, NUM_TOKENS, **OPTIONS) as stream:
        for _ in range(5):
            stream.read_text()
        victim = _wait_for_busy(graph)
        pid = graph.kill(victim)
        stream.read_all()
    assert (stream.text, stream.finish_reason) == (expected.text, "length")
    assert not stream.errors
    assert _num_retries(graph) > retries
    wait_until(lambda: graph.pid(victim) not in (None, pid), f"{victim} to be restarted")
    _works_again(graph, victim)


def test_a_worker_killed_under_many_requests(graph: Served, reference: Reference) -> None:
    """Half of them in blocks of which nothing is streamed before all of it has been looked at twice."""
    slowly: dict[str, Any] = {"ignore_eos": True, "unmasking": "quota", "steps_per_block": 32}
    doubting = ({}, {"remask_below": 0.03}, {}, {"remask_below": 0.03, "cache_policy": "prefix"})
    questions = [Question(f"count from {i} to {i + 60}", 96, slowly | doubting[i % 4]) for i in range(8)]
    expected = [question.expected(reference) for question in questions]
    retries, steps = _num_retries(graph), {worker: _num_steps_of(graph, worker) for worker in graph.workers()}
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.extend(together(*(q.by_http(graph) for q in questions))))
    asking.start()
    victim = _wait_for_busy(graph)
    # By then the second look has begun.
    wait_until(lambda: _num_steps_of(graph, victim) > steps[victim] + 36, "36 steps")
    graph.kill(victim)
    asking.join()
    assert answers == expected
    assert _num_retries(graph) > retries
    _works_again(graph, victim)


def test_a_hanging_worker_is_given_up_and_may_come_back(graph: Served, expected: Answer) -> None:
    """Nothing breaks when a process is stopped: only its silence tells."""
    with graph.stream(PROMPT, NUM_TOKENS, **OPTIONS) as stream:
        for _ in range(3):
            stream.read_text()
        victim = _wait_for_busy(graph)
        pid = graph.kill(victim, signal.SIGSTOP)
        try:
            stopped = time.monotonic()
            wait_until(lambda: graph.metrics("router").get("sangam_router_workers") == 1, "the router to notice")
            assert time.monotonic() - stopped < WORKER_TIMEOUT_S + 5.0
        finally:
            os.kill(pid, signal.SIGCONT)
        stream.read_all()
    assert (stream.text, stream.finish_reason) == (expected.text, "length")
    assert not stream.errors
    _works_again(graph, victim)
    assert graph.pid(victim) == pid, "it was not restarted"


def test_who_hung_for_longer_than_the_lease_comes_back(graph: Served, reference: Reference) -> None:
    """As after a laptop's sleep: discovery has forgotten the processes, which do not know."""
    pids = [graph.kill(program, signal.SIGSTOP) for program in ("colocated_worker.0", "router")]
    try:
        wait_until(
            lambda: not any("/router/" in name for name in graph.discovered()) and _num_discovered_workers(graph) == 1,
            "discovery to forget them",
        )
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    wait_until(lambda: _num_discovered_workers(graph) == 2, "them to be discovered again")
    graph.wait_until_whole(num_workers=2)
    wait_until(lambda: _can_chat(graph), "answers")
    assert graph.chat("spell lily", 32)["text"] == reference.chat("spell lily", 32).text


def _num_discovered_workers(graph: Served) -> int:
    return sum("/colocated_worker/generate/" in name for name in graph.discovered())


def test_a_killed_router_comes_back_with_the_model(graph: Served, reference: Reference) -> None:
    pid = graph.kill("router")
    wait_until(lambda: not is_alive(pid), "the router to be gone")
    wait_until(lambda: graph.pid("router") not in (None, pid), "the router to be restarted")
    graph.wait_until_whole(num_workers=2)
    wait_until(lambda: _can_chat(graph), "answers")
    assert graph.chat("spell lily", 32)["text"] == reference.chat("spell lily", 32).text


def test_requests_in_a_killed_router_end_with_an_error(graph: Served) -> None:
    with graph.stream(PROMPT, NUM_TOKENS, **OPTIONS) as stream:
        stream.read_text()
        graph.kill("router")
        stream.read_all()
    assert stream.errors and stream.finish_reason is None
    graph.wait_until_whole(num_workers=2)
    wait_until(lambda: _can_chat(graph), "answers")


def test_nats_killed_and_restarted(graph: Served, expected: Answer, reference: Reference) -> None:
    """The frontend is back before the router, which is stopped so that it is: requests sent meanwhile wait."""
    with graph.stream(PROMPT, NUM_TOKENS, **OPTIONS) as stream:
        stream.read_text()
        pid = graph.kill("nats")
        router = graph.kill("router", signal.SIGSTOP)
        sent_again = _num_sent_again(graph)
        log = graph.logs / "frontend.log"
        log_size = log.stat().st_size
        try:
            wait_until(lambda: graph.pid("nats") not in (None, pid), "NATS to be restarted")
            with ThreadPoolExecutor() as pool:
                answer = pool.submit(graph.chat, "spell lily", 32)
                wait_until(lambda: _num_sent_again(graph) > sent_again + 1000, "the frontend to find no router")
                os.kill(router, signal.SIGCONT)
                assert answer.result()["text"] == reference.chat("spell lily", 32).text
            assert log.stat().st_size - log_size < 100_000, "a line for every time"
        finally:
            os.kill(router, signal.SIGCONT)
        stream.read_all()
    assert (stream.text, stream.finish_reason) == (expected.text, "length")
    graph.wait_until_whole(num_workers=2)
    wait_until(lambda: _can_chat(graph), "answers")


def _num_sent_again(graph: Served) -> float:
    """Requests that the frontend has sent to the router once more."""
    lines = requests.get(f"{graph.url}/metrics", timeout=10).text.splitlines()
    name = "dynamo_frontend_model_migration_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and "new_request" in line)


def _can_chat(graph: Served) -> bool:
    body = {"messages": [{"role": "user", "content": "spell lily"}], "max_tokens": 32}
    return graph.post("/v1/chat/completions", body).ok


def test_without_workers_the_model_is_not_listed(graph: Served, reference: Reference) -> None:
    """Stopped first, so that the supervisor does not restart them before anyone can look."""
    pids = [graph.kill(worker, signal.SIGSTOP) for worker in graph.workers()]
    try:
        wait_until(lambda: not graph.model_is_listed(), "the model to disappear", 15.0)
        body = {"messages": [{"role": "user", "content": "spell lily"}], "max_tokens": 32}
        assert graph.post("/v1/chat/completions", body).status_code == 404
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    wait_until(graph.model_is_listed, "the model to come back")
    graph.wait_until_whole(num_workers=2)
    assert graph.chat("spell lily", 32)["text"] == reference.chat("spell lily", 32).text
