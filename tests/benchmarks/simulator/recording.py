"""A live run without the processes: the real dispatcher and step loops with the demonstration model, written down.

Time is counted from the start of the run. A block's parts are named as the workers know it: request/block.attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from backend.attention.kv_cache import KVCache
from backend.core.ledger import Dispatch
from backend.core.page_pool import PagePool
from backend.core.prefill_scheduler import PrefillScheduler, PrefillSchedulerConfig
from backend.core.request import Request
from backend.core.scheduler import Scheduler, SchedulerConfig
from backend.core.step import StepPlan, StepResult
from backend.engine.async_engine import AsyncEngine
from backend.engine.engine import Engine, StepOutput
from backend.engine.model_runner import ModelRunner
from backend.models.layers import Transformer
from backend.transfer.base import KVTransfer, TransferStats
from backend.transfer.local import LocalNetwork, LocalTransfer
from benchmarks.simulator.config import SimulatorConfig
from components.dispatcher import Dispatcher, Trip
from components.protocol import BlockNews, HeldKV, read_dispatch
from components.runtime import Context, Message
from tests.components.fakes import COLOCATED, PREFILL, FakeBus, FakeContext, report

Step = tuple[tuple[str, ...], tuple[str, ...], int]
"""Names of a step's prefills and of its decodes, and the tokens that these compute."""


def step_of(plan: StepPlan) -> Step:
    return tuple(r.request_id for r in plan.prefills), tuple(r.request_id for r in plan.decodes), plan.decode_tokens


@dataclass
class Turn:
    """One turn of a step loop: it has done what it was asked, and begins a step or finds nothing to run."""

    began_s: float
    step: Step | None = None
    ended_s: float = 0.0
    commands: list[tuple[str, str]] = field(default_factory=list)
    """(what, block) of everything that it was asked since the turn before."""


class Recorder:
    """Attributes:
    turns: per worker.
    times: of (what, block): when it was sent to a worker, or when the router dealt with it.
    placed: of (what, block): the worker.
    commits: per block and forward.
    arrivals: per request when it came.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.turns: dict[int, list[Turn]] = defaultdict(list)
        self.commands: dict[int, list[tuple[str, str]]] = defaultdict(list)
        self.times: dict[tuple[str, str], float] = {}
        self.placed: dict[tuple[str, str], int] = {}
        self.commits: dict[str, list[tuple[tuple[int, int], ...]]] = defaultdict(list)
        self.arrivals: dict[str, float] = {}

    def now(self) -> float:
        return time.perf_counter() - self._started

    def note(self, what: str, block: str) -> None:
        if what == "freed":
            # The worker says so on its way to its next turn, and may be overtaken by its own word.
            worker = self.placed["prefill", block]
            while ("read", block) in self.commands[worker]:
                time.sleep(0)
        self.times.setdefault((what, block), self.now())

    def settle(self) -> None:
        """Leaves out turns without a trace, and puts each message into the turn that it was found in.

        A thread may be interrupted between a message and its time.
        """
        for worker, turns in self.turns.items():
            kept: list[Turn] = []
            for turn in turns:
                if turn.step or turn.commands or not kept or kept[-1].step:
                    kept.append(turn)
            self.turns[worker] = kept
            for before, turn in zip([None, *kept], kept, strict=False):
                for command in turn.commands:
                    if before is not None and self.times[command] <= before.began_s:
                        self.times[command] = before.began_s + 1e-9


class RecordedEngine(Engine):
    def __init__(self, worker: int, recorder: Recorder, runner: ModelRunner, scheduler: Any) -> None:
        super().__init__(runner, scheduler)
        self._worker, self._recorder = worker, recorder

    def step(self, *arguments: Any) -> StepOutput | None:
        recorder = self._recorder
        turn = Turn(recorder.now())
        turn.commands, recorder.commands[self._worker] = recorder.commands[self._worker], []
        recorder.turns[self._worker].append(turn)
        output = super().step(*arguments)
        if output is not None:
            turn.step = step_of(output.plan)
            turn.ended_s = recorder.now()
        return output


class RecordedRunner(ModelRunner):
    recorder: Recorder

    def run(self, plan: StepPlan, on_layer: Any = None) -> StepResult:
        result = super().run(plan, on_layer)
        for request, commits in zip((*plan.prefills, *plan.decodes), result.commits, strict=True):
            self.recorder.commits[request.request_id].append(tuple(commits))
        return result


class RecordedScheduler(Scheduler):
    """Notes in which turn a command was carried out."""

    commands: list[tuple[str, str]]

    def __init__(self, worker: int, recorder: Recorder, config: SchedulerConfig, pool: PagePool) -> None:
        super().__init__(config, pool)
        self._worker, self._recorder = worker, recorder

    def add(self, request: Request) -> None:
        super().add(request)
        what = "colocated" if request.status.name == "WAITING" else "decode"
        self._recorder.commands[self._worker].append((what, request.request_id))

    def transfer_ended(self, request_id: str, arrived: bool) -> Request | None:
        self._recorder.commands[self._worker].append(("transfer", request_id))
        return super().transfer_ended(request_id, arrived)


class RecordedPrefillScheduler(PrefillScheduler):
    def __init__(self, worker: int, recorder: Recorder, config: PrefillSchedulerConfig, pool: PagePool) -> None:
        super().__init__(config, pool)
        self._worker, self._recorder = worker, recorder

    def add(self, request: Request) -> None:
        super().add(request)
        self._recorder.commands[self._worker].append(("prefill", request.request_id))

    def release(self, request_id: str) -> Request | None:
        released = super().release(request_id)
        if released is not None:
            self._recorder.commands[self._worker].append(("read", request_id))
        return released


class NeverStopped(FakeContext):
    """Of a client that stays."""

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        return asyncio.get_running_loop().create_future()

    def detached(self, id: str) -> Context:
        return NeverStopped(id)


@dataclass
class LiveWorker:
    engine: AsyncEngine
    transfer: KVTransfer


class LiveWorkers:
    """The workers of one pool behind the dispatcher's interface, as `PrefillWorker` and `ColocatedWorker` answer."""

    def __init__(self, workers: dict[int, LiveWorker], sources: dict[int, LiveWorker], recorder: Recorder) -> None:
        self._workers, self._sources, self._recorder = workers, sources, recorder

    def ids(self) -> list[int]:
        return list(self._workers)

    async def call(
        self, worker_id: int, message: Message, context: Context, lost: asyncio.Event
    ) -> AsyncGenerator[Message]:
        request, held = read_dispatch(message)
        name, recorder, worker = request.request_id, self._recorder, self._workers[worker_id]
        what = "decode" if held else "colocated" if self._sources is not self._workers else "prefill"
        recorder.placed[what, name] = worker_id
        recorder.note(what, name)
        stream = worker.engine.submit(request, self._reader(worker.transfer, held, name) if held else None)
        async with aclosing(aiter(stream)) as updates:  # type: ignore[type-var]
            async for update in updates:
                kv = update.held
                told = HeldKV(worker_id, name, kv.pages, kv.stamp, kv.commits) if kv else None
                yield BlockNews(update.tokens, update.is_done, told, update.error or "").to_wire()

    def _reader(self, transfer: KVTransfer, held: HeldKV, name: str) -> Any:
        def pull(pages: Sequence[int]) -> Future[TransferStats]:
            source = self._sources[held.worker_id].transfer.source()
            future = transfer.pull(source, held.pages, pages, stamp=held.stamp, key=held.key, timeout_s=10.0)
            future.add_done_callback(lambda _: self._recorder.note("transfer", name))
            return future

        return pull


@asynccontextmanager
async def live_dispatcher(model: Transformer, config: SimulatorConfig, recorder: Recorder) -> AsyncIterator[Dispatcher]:
    """The graph of `config` with real workers of this model."""
    network = LocalNetwork()
    shape = model.config
    pools: tuple[dict[int, LiveWorker], dict[int, LiveWorker]] = {}, {}
    for number in range(config.num_prefill + config.num_colocated):
        cache = KVCache(
            shape.num_layers, config.num_pages, config.page_size, shape.num_kv_heads, shape.head_dim,
            model.embedding.weight.dtype, model.embedding.weight.device,
        )  # fmt: skip
        pool = PagePool(config.num_pages, config.page_size)
        is_prefill = number < config.num_prefill
        scheduler = (
            RecordedPrefillScheduler(number, recorder, PrefillSchedulerConfig(config.max_prefill_tokens), pool)
            if is_prefill
            else RecordedScheduler(number, recorder, SchedulerConfig(config.token_budget, config.max_num_seqs), pool)
        )
        runner = RecordedRunner(model, cache)
        runner.recorder = recorder
        engines: list[AsyncEngine] = []

        def pulled(key: str, engines: list[AsyncEngine] = engines) -> None:
            recorder.note("read", key)
            engines[0].pulled(key)

        transfer = LocalTransfer(cache, str(number), "m", pulled, network)
        engines.append(AsyncEngine(RecordedEngine(number, recorder, runner, scheduler), transfer))
        pools[not is_prefill][number] = LiveWorker(engines[0], transfer)
        engines[0].start()
    prefill = LiveWorkers(pools[0], pools[0], recorder)
    colocated = LiveWorkers(pools[1], pools[0], recorder)
    calls: Any = {PREFILL: prefill, COLOCATED: colocated}
    dispatcher = Dispatcher(
        config.policy(), calls, colocated, FakeBus(),  # type: ignore[arg-type]
        max_attempts=1, worker_timeout_s=60.0, placement_timeout_s=60.0,
    )  # fmt: skip
    tokens = config.num_pages * config.page_size
    for component, workers in ((PREFILL, prefill), (COLOCATED, colocated)):
        for worker in workers.ids():
            dispatcher.fleet.receive(
                report(worker, component=component, capacity_tokens=tokens, page_size=config.page_size)
            )
    _record_placer(dispatcher, recorder)
    yield dispatcher
    for worker in (*pools[0].values(), *pools[1].values()):
        await worker.engine.stop()
        worker.transfer.close()


def _record_placer(dispatcher: Dispatcher, recorder: Recorder) -> None:
    placer = dispatcher.placer

    def noted(what: str, call: Callable[[Dispatch], None]) -> Any:
        def noting(dispatch: Dispatch) -> None:
            recorder.note(what, "{}/{}.{}".format(*dispatch))
            call(dispatch)

        return noting

    placer.prefilled = noted("prefilled", placer.prefilled)  # type: ignore[method-assign]
    placer.source_freed = noted("freed", placer.source_freed)  # type: ignore[method-assign]
    placer.done = noted("done", placer.done)  # type: ignore[method-assign]


async def serve(dispatcher: Dispatcher, request: Request, recorder: Recorder) -> list[int]:
    """What the router does for one request."""
    trip, context = Trip(), NeverStopped(request.request_id)
    request.arrival_time = recorder.arrivals[request.request_id] = recorder.now()
    while True:
        async with aclosing(dispatcher.run_block(request, context, trip)) as progress:
            async for _ in progress:
                tokens, status = request.answer()
                if status is not None:
                    return tokens
        request.next_block()


async def record(
    model: Transformer, config: SimulatorConfig, requests: Sequence[Request], gaps_s: Sequence[float]
) -> tuple[Recorder, list[list[int]]]:
    """Sends each request so long after the one before; what happened, and the answers."""
    recorder = Recorder()
    async with live_dispatcher(model, config, recorder) as dispatcher:
        answers = []
        for request, gap_s in zip(requests, gaps_s, strict=True):
            await asyncio.sleep(gap_s)
            answers.append(asyncio.ensure_future(serve(dispatcher, request, recorder)))
        found = await asyncio.gather(*answers)
    recorder.settle()
    return recorder, found
