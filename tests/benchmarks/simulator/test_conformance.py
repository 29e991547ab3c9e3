"""A recorded live run and its simulation take the same decisions: every step of every worker, every placement."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.core.step import StepPlan
from backend.models.layers import Transformer
from backend.models.loader import load_model
from benchmarks.demo_model.tasks import TASKS
from benchmarks.demo_model.tokenizer import WordTokenizer
from benchmarks.simulator.clock import Clock
from benchmarks.simulator.config import SimulatorConfig
from benchmarks.simulator.flight import Flight, Trip
from benchmarks.simulator.graph import Graph
from benchmarks.simulator.timing import Message
from benchmarks.simulator.worker import SimWorker
from components.config import DEMO_MODELS
from tests.benchmarks.simulator.recording import Recorder, Step, record, step_of

NUM_REQUESTS = 40
CONFIGS: dict[str, dict[str, Any]] = {
    "colocated": {"num_colocated": 2, "token_budget": 200},
    "colocated, little memory": {"num_colocated": 2, "token_budget": 200, "kv_cache_tokens": 800},
    "disaggregated": {"num_prefill": 1, "num_colocated": 2, "overflow_threshold": math.inf, "token_budget": 200},
    "hybrid": {"num_prefill": 1, "num_colocated": 2, "overflow_threshold": 300, "token_budget": 200},
    "conditional": {
        "num_prefill": 1, "num_colocated": 2, "routing": "conditional",
        "max_local_prefill_length": 24, "max_prefill_queue_size": 2, "token_budget": 200,
    },
    "hybrid, little memory": {
        "num_prefill": 2, "num_colocated": 1, "overflow_threshold": 600, "token_budget": 200,
        "kv_cache_tokens": 800,
    },
}  # fmt: skip


def configured(name: str) -> SimulatorConfig:
    defaults = {"kv_cache_tokens": 8192, "page_size": 8, "max_num_seqs": 8, "max_prefill_tokens": 400}
    return SimulatorConfig(**{**defaults, **CONFIGS[name]})


CACHE_POLICIES: tuple[dict[str, Any], ...] = (
    {"cache_policy": "none"},
    {"cache_policy": "prefix"},
    {"cache_policy": "dual", "cache_refresh_interval": 3},
    {"cache_policy": "prefix", "cache_refresh_interval": 5},
    {"cache_policy": "dkv-decode"},
    {"cache_policy": "dkv-prefill"},
    {"cache_policy": "dual"},
)


def asked(policies: Sequence[dict[str, Any]]) -> list[Request]:
    """Questions that the demonstration model knows, of one block and of several, in few steps and in many."""
    rng, tokenizer = random.Random(5), WordTokenizer()
    requests = []
    for number in range(NUM_REQUESTS):
        task = rng.choice(("count", "repeat", "first", "say"))
        params = SamplingParams(
            max_tokens=128,
            canvas_length=128,
            unmasking="quota",
            steps_per_block=rng.choice((1, 4, 12)),
            stop_token_ids=(tokenizer.end,),
            **policies[number % len(policies)],
        )
        example = TASKS[task](rng, rng.uniform(0.5, 1.0))
        requests.append(Request(f"r{number}", tokenizer.prompt(example), params, 0.0))
    return requests


class Replay:
    """A timing that has everything happen when the recorded run says, and notes what is decided.

    Attributes:
        num_overlaps: how often what was to happen next had a time that is past: two threads of the live
            run were interrupted so that their stamps do not tell what came first.
    """

    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self._recorder, self._clock = recorder, clock
        self._turn = {worker: -1 for worker in recorder.turns}
        self._end_s = max(turn.began_s for turns in recorder.turns.values() for turn in turns)
        self.steps: dict[int, list[Step]] = {worker: [] for worker in recorder.turns}
        self.placed: dict[tuple[str, str], int] = {}
        self.num_overlaps = 0

    def turn_s(self, worker: SimWorker) -> float:
        turns = self._recorder.turns[worker.worker_id]
        self._turn[worker.worker_id] = turn = self._turn[worker.worker_id] + 1
        return self._until(turns[turn].began_s) if turn < len(turns) else 0.0  # it was told to stop

    def step_s(self, worker: SimWorker, plan: StepPlan) -> float:
        step = step_of(plan)
        self.steps[worker.worker_id].append(step)
        turn = self._recorder.turns[worker.worker_id][self._turn[worker.worker_id]]
        if turn.step != step and not self.num_overlaps:
            number = len(self.steps[worker.worker_id])
            pytest.fail(f"worker {worker.worker_id}, step {number}: {step} in place of {turn.step}")
        return self._until(turn.ended_s)

    def message_s(self, message: Message, flight: Flight) -> float:
        if message in ("prefill", "colocated", "decode"):
            assert flight.worker is not None
            self.placed[message, flight.request.request_id] = flight.worker.worker_id
        return self._when(message, flight)

    def transfer_s(self, flight: Flight) -> float:
        return self._when("transfer", flight)

    def read_s(self, flight: Flight) -> float:
        return self._when("read", flight)

    def _when(self, what: str, flight: Flight) -> float:
        # Of a block that is done the router does not hear any more whose pages are free.
        return self._until(self._recorder.times.get((what, flight.request.request_id), self._end_s))

    def _until(self, when_s: float) -> float:
        self.num_overlaps += when_s < self._clock.now
        return max(when_s - self._clock.now, 0.0)


def simulated(config: SimulatorConfig, recorder: Recorder, requests: list[Request]) -> tuple[Replay, list[Trip]]:
    clock = Clock()
    replay = Replay(recorder, clock)
    graph = Graph(config, clock, replay, math.inf, lambda trip: None)
    trips = []
    for number, request in enumerate(requests):
        names = (f"{request.request_id}/{block}.1" for block in range(request.block.index + 1))
        blocks = [recorder.commits[name] for name in names]
        trip = Trip(number, request.request_id, request.prompt, request.params, blocks)
        clock.after(recorder.arrivals[trip.name], graph.arrive, trip)
        trips.append(trip)
    clock.run()
    return replay, trips


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_model(DEMO_MODELS["demo"], torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_simulation_decides_as_the_recorded_run_did(model: Transformer, name: str) -> None:
    compare(model, configured(name), [{}])


@pytest.mark.parametrize("name", ["colocated", "hybrid, little memory"])
def test_so_it_does_with_every_cache_policy_at_once(model: Transformer, name: str) -> None:
    steps = compare(model, configured(name), CACHE_POLICIES)
    seen = [block for prefills, _, _ in steps for block in prefills]
    assert len(seen) > len(set(seen)) + NUM_REQUESTS, "blocks were prefilled again in the middle"
    tokens_of_one = {num_tokens for _, decodes, num_tokens in steps if len(decodes) == 1}
    assert len(tokens_of_one) > 4, "decodes computed more than their block"


def compare(model: Transformer, config: SimulatorConfig, policies: Sequence[dict[str, Any]]) -> list[Step]:
    """All steps."""
    rng = random.Random(7)
    for _ in range(5):  # a record whose stamps contradict each other says nothing: it is made again
        requests = asked(policies)
        gaps_s = [0.0 if number % 5 else rng.expovariate(1 / 0.02) for number in range(NUM_REQUESTS)]
        recorder, answers = asyncio.run(asyncio.wait_for(record(model, config, requests, gaps_s), 60))
        replay, trips = simulated(config, recorder, requests)
        if not replay.num_overlaps:
            break
    else:
        pytest.fail("five records in a row with contradictory times")
    live = {worker: [turn.step for turn in turns if turn.step] for worker, turns in recorder.turns.items()}
    assert replay.steps == live
    assert replay.placed == recorder.placed
    assert [trip.num_tokens for trip in trips] == [len(answer) for answer in answers]
    # It was worth comparing: requests shared steps, and waited for each other.
    sizes = [len(prefills) + len(decodes) for steps in live.values() for prefills, decodes, _ in steps]
    assert len(sizes) > 50 and max(sizes) >= 2
    return [step for steps in live.values() for step in steps]
