"""A random life of the placer: workers come and go, messages are late or twice, anything is withdrawn.

After every action its books equal a recount, nobody was passed over, and nothing waits that could go.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from random import Random

import pytest

from backend.core.ledger import Dispatch, Ledger
from backend.core.placer import Placer
from backend.core.routing import ColocatedPolicy, ConditionalPolicy, HybridPolicy, Prefill, Route, RouteKind
from backend.core.worker_pool import WorkerLoad, WorkerPool
from tests.backend.core.naive import NaiveWorker, algorithm_2, colocated_serving

LARGEST = 160
STAGES = ("queued", "prefill", "colocated", "pending", "decode")
POLICIES: dict[str, ColocatedPolicy | ConditionalPolicy | HybridPolicy] = {
    "colocated": ColocatedPolicy(),
    "conditional": ConditionalPolicy(40, 3),
    **{f"hybrid {threshold}": HybridPolicy(threshold) for threshold in (1, 100, 300, inf)},
}


class RecordingLedger(Ledger):
    """Tells who promised what to whom."""

    def __init__(self) -> None:
        super().__init__()
        self.promises: dict[Dispatch, WorkerLoad] = {}
        self.kept: WorkerLoad | None = None
        """Who had promised the pages that were reserved last."""

    def promise(self, dispatch: Dispatch, load: WorkerLoad, num_tokens: int) -> None:
        super().promise(dispatch, load, num_tokens)
        self.promises[dispatch] = load

    def unpromise(self, dispatch: Dispatch) -> None:
        super().unpromise(dispatch)
        self.promises.pop(dispatch, None)

    def reserve(self, dispatch: Dispatch, load: WorkerLoad, num_tokens: int) -> None:
        super().reserve(dispatch, load, num_tokens)
        self.kept = self.promises.pop(dispatch, None)

    def done(self, dispatch: Dispatch) -> list[WorkerLoad]:
        self.promises.pop(dispatch, None)
        return super().done(dispatch)


@dataclass
class Worker:
    load: WorkerLoad
    is_prefill: bool
    is_alive: bool = True

    @property
    def is_shown(self) -> bool:
        return self.load.pool is not None


@dataclass
class Job:
    """One dispatch as the model sees it. Its stages: queued, prefill or colocated, pending, decode."""

    dispatch: Dispatch
    prefill: Prefill
    stage: str = "queued"
    has_run: bool = False
    source: WorkerLoad | None = None
    target: WorkerLoad | None = None
    handed_over_as: int = 0
    is_broken: bool = False

    @property
    def tokens(self) -> int:
        return self.prefill.num_tokens

    @property
    def turn(self) -> tuple[float, int]:
        return self.prefill.arrival_time, self.handed_over_as


def room(load: WorkerLoad) -> int:
    """Tokens that are neither taken nor promised."""
    return (load.num_pages - load.used_pages - load.promised_pages) * load.page_size


class Life:
    """One placer and its world, driven by one seed."""

    def __init__(self, policy: ColocatedPolicy | ConditionalPolicy | HybridPolicy, seed: int) -> None:
        self.policy = policy
        self.random = Random(seed)
        self.placer = Placer(policy, self.assigned)
        self.placer.ledger = self.ledger = RecordingLedger()
        self.workers: dict[int, Worker] = {}
        self.loads: list[WorkerLoad] = []
        self.jobs: dict[Dispatch, Job] = {}
        self.queue: list[Dispatch] = []
        self.gone: list[Dispatch] = [("never heard of", 0, 1)]
        self.num_assigned = self.num_handed_over = self.num_submitted = 0
        self.overcommitted: set[WorkerLoad] = set()
        """Where colocated serving has queued more than fits."""
        self.overbooked: WorkerLoad | None = None
        """Where a decode was queued although it does not fit: only before a prefill that is, too."""

    def live(self, num_actions: int) -> None:
        """Lives differ in how often each thing happens."""
        common = (
            self.submit, self.run_prefill, self.hand_over, self.hand_over_early, self.free_source, self.end,
            self.say_what_does_not_matter,
        )  # fmt: skip
        rare = self.join, self.hide_or_show_again, self.die, self.notice_death, self.notice_broken
        actions = common + rare
        weights = [self.random.choice((1, 5, 10) if action in common else (0, 1, 2)) for action in actions]
        for _ in range(self.random.randint(0, 6)):
            self.join()
        for action in self.random.choices(actions, weights, k=num_actions):
            action()
            self.check()

    def check(self) -> None:
        assert self.overbooked is None
        self.books_equal_a_recount()
        self.no_prefill_waits_that_could_go()
        self.no_pending_decode_waits_that_could_go()

    def pool_of(self, worker: Worker) -> WorkerPool:
        return self.placer.prefill_pool if worker.is_prefill else self.placer.colocated_pool

    def shown(self, is_prefill: bool) -> list[Worker]:
        return [w for w in self.workers.values() if w.is_prefill == is_prefill and w.is_shown]

    def some_job(self, *stages: str) -> Job | None:
        jobs = [job for job in self.jobs.values() if job.stage in stages]
        return self.random.choice(jobs) if jobs else None

    def some_worker(self, *, is_alive: bool) -> Worker | None:
        workers = [worker for worker in self.workers.values() if worker.is_alive == is_alive]
        return self.random.choice(workers) if workers else None

    # What the placer decides.

    def assigned(self, dispatch: Dispatch, route: Route) -> None:
        job, load = self.jobs[dispatch], route.load
        worker = self.workers[load.worker_id]
        assert worker.load is load and worker.is_shown
        assert worker.is_prefill == (route.kind is RouteKind.PREFILL)
        assert worker.load.capacity_tokens >= job.tokens
        self.num_assigned += 1
        if route.kind is RouteKind.DECODE:
            assert job.stage == "pending"
            job.stage, job.target = "decode", load
            assert room(load) >= 0 or self.ledger.kept is load, "took what was promised to others"
            if load.free_pages < 0:
                self.overbooked = load
        else:
            assert job.stage == "queued"
            for earlier in self.queue[: self.queue.index(dispatch)]:
                assert self.placer.is_stranded(earlier), "passed over"
            self.queue.remove(dispatch)
            job.source = load
            job.stage = "prefill" if worker.is_prefill else "colocated"
            if worker.is_prefill:
                assert load.free_pages >= 0
            elif isinstance(self.policy, HybridPolicy) and self.has_prefill_worker_for(job.prefill):
                assert room(load) >= 0, "a prefill took what was promised to a pending decode"
                assert self.policy.overflow_threshold < inf
            else:
                assert load not in self.ledger.promises.values(), "queued before those who were promised its pages"
                assert self.overbooked in (None, load)
                self.overcommitted.add(load)
                self.overbooked = None
        job.is_broken |= not worker.is_alive

    def has_prefill_worker_for(self, prefill: Prefill) -> bool:
        able = (worker.load.capacity_tokens >= prefill.num_tokens for worker in self.shown(is_prefill=True))
        return any(able) and not prefill.is_local_only

    # Workers.

    def join(self) -> None:
        is_prefill = self.random.random() < 0.5
        worker_id = self.random.randint(0, 2) + 10 * is_prefill
        if worker_id not in self.workers:
            page = self.random.choice((8, 16))
            load = WorkerLoad(worker_id, self.random.randint(LARGEST // 2, 2 * LARGEST) // page, page)
            self.loads.append(load)
            self.workers[worker_id] = Worker(load, is_prefill)
            self.show(self.workers[worker_id])

    def hide_or_show_again(self) -> None:
        worker = self.some_worker(is_alive=self.random.random() < 0.7)
        if worker is not None and worker.is_shown:
            self.placer.hide(worker.load)
        elif worker is not None and worker.is_alive:
            self.show(worker)

    def show(self, worker: Worker) -> None:
        if not worker.is_prefill:
            back = [d for d in self.queue if self.placer.is_stranded(d)]
            back = [d for d in back if self.jobs[d].tokens <= worker.load.capacity_tokens]
            self.queue = [d for d in self.queue if d not in back] + back
        self.placer.show(worker.load, self.pool_of(worker))

    def die(self) -> None:
        """The router does not know yet: it may find out by the worker's silence or by any of its blocks."""
        worker = self.some_worker(is_alive=True)
        if worker is not None:
            worker.is_alive = False
            for job in self.jobs.values():
                job.is_broken |= worker.load in (job.source, job.target)

    def notice_death(self) -> None:
        worker = self.some_worker(is_alive=False)
        if worker is not None:
            self.placer.hide(worker.load)
            del self.workers[worker.load.worker_id]

    def notice_broken(self) -> None:
        broken = [job for job in self.jobs.values() if job.is_broken]
        if broken:
            self.retry(self.random.choice(broken))

    def retry(self, job: Job) -> None:
        name, block, attempt = job.dispatch
        self.end_job(job)
        self.submit_job(Job((name, block, attempt + 1), job.prefill))

    # Blocks.

    def submit(self) -> None:
        if len(self.jobs) < 30:
            self.num_submitted += 1
            tokens = self.random.randint(1, self.random.choice((LARGEST // 4, LARGEST)))
            previous = self.random.choice((None, RouteKind.PREFILL, RouteKind.COLOCATED))
            is_local_only = self.random.random() < 0.1
            prefill = Prefill(tokens, tokens // 2, float(self.random.randint(0, 5)), previous, is_local_only)
            self.submit_job(Job((str(self.num_submitted), 0, 1), prefill))

    def submit_job(self, job: Job) -> None:
        self.jobs[job.dispatch] = job
        self.queue.append(job.dispatch)
        self.placer.submit(job.dispatch, job.prefill)

    def run_prefill(self) -> None:
        job = self.some_job("prefill", "colocated", "decode")
        if job is not None:
            job.has_run = True
            is_early = job.stage == "decode"  # then its end may be told of either way
            tell = self.placer.hand_over if is_early and self.random.random() < 0.5 else self.placer.prefilled
            tell(job.dispatch)

    def hand_over(self) -> None:
        """With or without word of its prefill before; its KV may even be gone already."""
        job = self.some_job("prefill")
        if job is not None:
            self.hand_over_job(job)

    def hand_over_job(self, job: Job) -> None:
        self.num_handed_over += 1
        job.stage, job.has_run, job.handed_over_as = "pending", True, self.num_handed_over
        self.placer.hand_over(job.dispatch)

    def hand_over_early(self) -> None:
        """Before its prefill has run: only if there is room for it now."""
        job = self.some_job("prefill")
        if job is not None:
            able = [w.load for w in self.shown(is_prefill=False) if room(w.load) >= job.tokens]
            job.stage = "pending"
            if not self.placer.hand_over_early(job.dispatch):
                job.stage = "prefill"
            assert (job.stage == "decode") == bool(able)

    def free_source(self) -> None:
        job = self.some_job("prefill", "pending", "decode", "decode", "decode")
        if job is not None:
            job.source, job.has_run = None, True
            self.placer.source_freed(job.dispatch)

    def end(self) -> None:
        """It ended, failed or was withdrawn, at whatever stage; mostly at its natural one."""
        stages = self.random.choice((("decode", "colocated"), ("decode", "colocated"), STAGES))
        job = self.some_job(*stages)
        if job is not None:
            self.end_job(job)

    def end_job(self, job: Job) -> None:
        del self.jobs[job.dispatch]
        self.gone.append(job.dispatch)
        if job.stage == "queued":
            self.queue.remove(job.dispatch)
        self.placer.done(job.dispatch)

    def say_what_does_not_matter(self) -> None:
        """News of who is gone, or waits for its prefill, or has told it before."""
        message = self.random.choice(("prefilled", "hand_over", "hand_over_early", "source_freed", "done"))
        about = self.gone[-10:]
        for job in self.jobs.values():
            if message != "done" and (
                job.stage == "queued"
                or (message == "prefilled" and job.has_run)
                or (message == "hand_over" and job.stage != "prefill" and job.has_run)
                or (message == "hand_over_early" and job.stage != "prefill")
                or (message == "source_freed" and job.source is None)
            ):
                about.append(job.dispatch)
        before = self.num_assigned, [NaiveWorker.of(load) for load in self.loads]
        getattr(self.placer, message)(self.random.choice(about))
        assert (self.num_assigned, [NaiveWorker.of(load) for load in self.loads]) == before

    # What holds after every action.

    def books_equal_a_recount(self) -> None:
        jobs = self.jobs.values()
        for load in self.loads:
            waiting = [job.tokens for job in jobs if job.source is load and not job.has_run]
            here = [job.tokens for job in jobs for place in (job.source, job.target) if place is load]
            promised = [self.jobs[dispatch].tokens for dispatch, by in self.ledger.promises.items() if by is load]
            assert load.outstanding_prefill_tokens == sum(waiting)
            assert load.num_prefills == len(waiting)
            assert load.num_requests == len(here)
            assert load.used_pages == sum(map(load.pages_for, here))
            assert load.promised_pages == sum(map(load.pages_for, promised))
            if load.used_pages <= load.num_pages:
                self.overcommitted.discard(load)
            assert load.used_pages <= load.num_pages or load in self.overcommitted
        assert self.placer.num_queued == len(self.queue)
        assert self.placer.num_pending_decodes == sum(job.stage == "pending" for job in jobs)

    def no_prefill_waits_that_could_go(self) -> None:
        largest = max((worker.load.capacity_tokens for worker in self.shown(is_prefill=False)), default=0)
        turn = []
        for dispatch in self.queue:
            if self.placer.is_stranded(dispatch):
                assert self.jobs[dispatch].tokens > largest
            else:
                turn.append(self.jobs[dispatch])
        if turn:
            assert turn[0].tokens <= largest
            assert not self.could_go(turn[0].prefill)

    def could_go(self, prefill: Prefill) -> bool:
        prefill_pool, colocated = (
            [NaiveWorker.of(worker.load) for worker in self.shown(is_prefill)] for is_prefill in (True, False)
        )
        if isinstance(self.policy, HybridPolicy) and not prefill.is_local_only:
            return algorithm_2(prefill.num_tokens, prefill_pool, colocated, self.policy.overflow_threshold) is not None
        if isinstance(self.policy, ColocatedPolicy) or prefill.is_local_only:
            return colocated_serving(prefill.num_tokens, colocated) is not None
        return self.policy.route(prefill, self.placer.prefill_pool, self.placer.colocated_pool) is not None

    def no_pending_decode_waits_that_could_go(self) -> None:
        pending = sorted((job for job in self.jobs.values() if job.stage == "pending"), key=lambda job: job.turn)
        assert set(self.ledger.promises) <= {job.dispatch for job in pending}
        colocated = [worker.load for worker in self.shown(is_prefill=False)]
        for job in pending:
            able = [load for load in colocated if load.capacity_tokens >= job.tokens]
            assert (self.ledger.promises.get(job.dispatch) in able) == bool(able)
            assert self.placer.is_stranded(job.dispatch) == (not able)
            assert all(room(load) < job.tokens for load in able)
        for load in colocated:
            own = [job for job in pending if self.ledger.promises.get(job.dispatch) is load]
            assert not own or load.pages_for(own[0].tokens) > load.free_pages

    # If workers go on finishing what they have, everything ends.

    def finish(self) -> None:
        """Without help, but for one colocated worker that can hold anything."""
        for worker in [worker for worker in self.workers.values() if not worker.is_alive]:
            self.placer.hide(worker.load)
            del self.workers[worker.load.worker_id]
        load = WorkerLoad(99, LARGEST // 16, 16)
        self.loads.append(load)
        self.workers[99] = Worker(load, is_prefill=False)
        self.show(self.workers[99])
        for _ in range(8 * len(self.jobs)):
            active = [job for job in self.jobs.values() if job.is_broken or job.stage not in ("queued", "pending")]
            if not active:
                break
            self.go_on(self.random.choice(active))
            self.check()
        assert not self.jobs, "stuck"
        assert len(self.ledger) == self.placer.num_queued == self.placer.num_pending_decodes == 0
        for load in self.loads:
            assert load.used_pages == load.outstanding_prefill_tokens == load.promised_pages == 0

    def go_on(self, job: Job) -> None:
        if job.is_broken:
            self.retry(job)
        elif job.source is not None and not job.has_run:
            job.has_run = True
            self.placer.prefilled(job.dispatch)
        elif job.stage == "prefill" and self.random.random() < 0.7:
            self.hand_over_job(job)
        elif job.stage != "colocated" and job.source is not None:
            job.source = None
            self.placer.source_freed(job.dispatch)
        else:
            self.end_job(job)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_happens(policy: str, seed: int) -> None:
    life = Life(POLICIES[policy], seed)
    life.live(150)
    life.finish()
