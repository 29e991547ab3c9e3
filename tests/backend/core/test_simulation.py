from __future__ import annotations

from math import inf
from typing import Literal

import pytest

from backend.core.auto_threshold import AutoHybridPolicy
from backend.core.request import RequestStatus
from backend.core.routing import ColocatedPolicy, ConditionalPolicy, HybridPolicy, Policy, RouteKind
from tests.backend.core.simulation import Answer, Graph

NUM_REQUESTS = 40
POLICIES: dict[str, Policy] = {
    "hybrid": HybridPolicy(40),
    "hybrid, auto": AutoHybridPolicy(),
    "disaggregated": HybridPolicy(inf),
    "conditional": ConditionalPolicy(10, 4),
    "colocated": ColocatedPolicy(),
}


def simulate(
    policy: Policy, seed: int, num_kills: int, num_withdrawn: int, token_budget: int | Literal["auto"] = 24
) -> tuple[Graph, list[Answer]]:
    """Two prefill and two colocated workers, whose memory is short."""
    graph = Graph(policy, seed, token_budget)
    rng = graph.random
    for worker_id in range(4):
        graph.join(worker_id, is_prefill=worker_id < 2, num_pages=rng.randint(14, 30))
    answers = []
    for number in range(NUM_REQUESTS):
        arrival, canvas = rng.random() * 0.3, rng.choice((4, 8, 16))
        answers.append(Answer(str(number), rng.randint(0, canvas + 4), rng.randint(1, 32), canvas, arrival))
        graph.at(arrival, graph.arrive, answers[-1])
    for answer in answers[:num_withdrawn]:
        graph.at(answer.arrival + rng.random() * 0.03, graph.withdraw, answer)
    for number in range(num_kills):
        graph.at(0.1 * (number + rng.random() / 2), graph.kill, rng.randrange(4))
    graph.run()
    return graph, answers


def assert_is_all_there(answers: list[Answer]) -> None:
    for answer in answers:
        length = min(answer.num_tokens, answer.canvas)
        ended = RequestStatus.FINISHED_STOP if answer.num_tokens < answer.canvas else RequestStatus.FINISHED_LENGTH
        assert answer.status is ended
        assert answer.tokens == [answer.expected(position) for position in range(length)]


def assert_nothing_is_left(graph: Graph) -> None:
    placer = graph.placer
    assert not graph.flights and len(placer.ledger) == placer.num_queued == placer.num_pending_decodes == 0
    for worker in graph.all_workers:
        load = worker.load
        assert load.used_pages == load.promised_pages == load.num_requests == load.outstanding_prefill_tokens == 0
        if worker.is_alive:
            worker.pool.check()
            assert worker.pool.num_free == worker.pool.num_pages
            assert not worker.scheduler.has_work and worker.denoising.num_transferring == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_and_every_page_comes_back(policy: str, seed: int) -> None:
    graph, answers = simulate(POLICIES[policy], seed, num_kills=0, num_withdrawn=0)
    assert_is_all_there(answers)
    assert_nothing_is_left(graph)
    assert max(answer.num_attempts for answer in answers) <= 4  # one for each block
    ran = set(graph.kinds)
    assert (RouteKind.COLOCATED in ran) == (policy != "disaggregated")
    assert (RouteKind.DECODE in ran) == (policy != "colocated")


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("policy", POLICIES)
def test_workers_may_die_and_clients_may_go(policy: str, seed: int) -> None:
    graph, answers = simulate(POLICIES[policy], seed, num_kills=4, num_withdrawn=8)
    assert_is_all_there([a for a in answers if a.status is not RequestStatus.FINISHED_ABORTED])
    assert_nothing_is_left(graph)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_that_tunes_itself_loses_nothing(policy: str, seed: int) -> None:
    graph, answers = simulate(POLICIES[policy], seed, num_kills=4, num_withdrawn=8, token_budget="auto")
    assert_is_all_there([a for a in answers if a.status is not RequestStatus.FINISHED_ABORTED])
    assert_nothing_is_left(graph)


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (simulate(POLICIES["hybrid"], 1, num_kills=3, num_withdrawn=3)[0] for _ in range(2))
    assert (first.now, first.kinds) == (second.now, second.kinds)
