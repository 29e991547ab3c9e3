"""Workers of both kinds killed every few seconds under load, NATS once: no request fails, no token changes.

SANGAM_CHAOS_S sets how long, in seconds; the suite's own run is a short one.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import TIMEOUT
from tests.e2e.questions import mixed
from tests.e2e.reference import Reference
from tests.e2e.served import SLOW, Served, wait_until
from tests.e2e.test_hybrid import SLOWLY

DURATION_S = float(os.environ.get("SANGAM_CHAOS_S", "40"))
NUM_CLIENTS = 10
KILL_EVERY_S = 4.0
NUM_WORKERS = 4

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(DURATION_S + 240)]


class Load:
    """Clients that ask one question after the other and check every answer."""

    def __init__(self, graph: Served, reference: Reference) -> None:
        self._graph = graph
        self._questions = [
            (q.prompt, q.max_tokens, reference.chat(q.prompt, q.max_tokens, ignore_eos=True, **SLOWLY).text)
            for q in mixed(60)
        ]
        self._stopping = threading.Event()
        self.wrong: list[str] = []
        self.num_right = 0
        self.slowest_s = 0.0
        self._threads = [threading.Thread(target=self._client, args=(i,)) for i in range(NUM_CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _client(self, number: int) -> None:
        rng = random.Random(number)
        while not self._stopping.is_set():
            prompt, tokens, expected = rng.choice(self._questions)
            started = time.monotonic()
            try:
                if number % 2:
                    answer = self._graph.chat(prompt, tokens, ignore_eos=True, nvext=SLOW)["text"]
                else:
                    with self._graph.stream(prompt, tokens, ignore_eos=True, nvext=SLOW) as stream:
                        answer = stream.read_all().text
                        assert not stream.errors, stream.errors
                assert answer == expected, f"{answer!r} instead of {expected!r}"
                self.num_right += 1
            except Exception as error:  # whatever it is, it is what a client would see
                self.wrong.append(f"{type(error).__name__}: {str(error)[:300]}")
            self.slowest_s = max(self.slowest_s, time.monotonic() - started)


def test_chaos(tmp_path: Path, chaotic_model: Path, chaotic_reference: Reference) -> None:
    flags = (
        "--prefill=2",
        "--colocated=2",
        "--overflow-threshold=250",
        "--kv-transfer-overlap=true",
        "--async-scheduling=true",
        TIMEOUT,
    )
    flags = (*flags, "--max-attempts=20")
    graph = Served(tmp_path, chaotic_model, "hybrid", *flags)
    rng = random.Random("chaos")
    kills: list[str] = []
    try:
        graph.wait_until_ready()
        graph.wait_until_whole(NUM_WORKERS)
        with Load(graph, chaotic_reference) as load:
            started = time.monotonic()
            nats_at = started + DURATION_S / 2
            while time.monotonic() - started < DURATION_S:
                time.sleep(KILL_EVERY_S * rng.uniform(0.5, 1.5))
                if nats_at and time.monotonic() > nats_at:
                    nats_at = 0
                    graph.kill("nats")
                    kills.append("nats")
                victim = rng.choice(graph.workers())
                # One of each kind has to live on: without any the frontend has nothing to send requests to.
                others = [w for w in graph.workers(victim.partition(".")[0]) if w != victim]
                if graph.pid(victim) is not None and all(graph.metrics(other) for other in others):
                    graph.kill(victim)
                    kills.append(victim)
        print(f"{len(kills)} kills, {load.num_right} right answers, the slowest after {load.slowest_s:.1f} s")
        assert not load.wrong, load.wrong
        assert load.num_right > 50 and "nats" in kills
        assert {kill.partition(".")[0] for kill in kills} == {"nats", "prefill_worker", "colocated_worker"}
        router = graph.metrics("router")
        assert router["sangam_router_retries"] > 0 and router["sangam_router_overflows_total"] > 0
        wait_until(lambda: graph.metrics("router").get("sangam_router_workers") == NUM_WORKERS, "restarts", 60.0)
        graph.wait_until_whole(NUM_WORKERS)
        assert graph.total("transfers_total") > 0
    finally:
        graph.stop()
