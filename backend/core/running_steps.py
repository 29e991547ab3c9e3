"""The steps whose results are not known yet, and the pages that they may still write."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable

from backend.core.block import Block
from backend.core.page_pool import PagePool
from backend.core.prefill_queue import release
from backend.core.queries import commits_only_first
from backend.core.request import Request
from backend.core.step import StepPlan
from backend.core.unmask_schedule import least_to_commit


class RunningSteps:
    """At most a few plans, in the order in which they were scheduled, run and end.

    Args:
        logits_shift: the model's, see `backend.core.queries`.
    """

    def __init__(self, pool: PagePool, logits_shift: int) -> None:
        self._pool = pool
        self._logits_shift = logits_shift
        self._steps: deque[tuple[StepPlan, list[Block]]] = deque()
        self._to_free: list[tuple[StepPlan, Hashable]] = []

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last(self) -> StepPlan:
        return self._steps[-1][0]

    def concern(self, names: Collection[str]) -> bool:
        """Whether any of these requests, by id, is in a step that runs."""
        return any(
            request.request_id in names for plan, _ in self._steps for request in (*plan.prefills, *plan.decodes)
        )

    def begin(self, plan: StepPlan) -> None:
        self._steps.append((plan, [request.block for request in (*plan.prefills, *plan.decodes)]))

    def end(self, plan: StepPlan) -> list[Request | None]:
        """The requests of the oldest step, in order; None for one that is at another block by now.

        Raises:
            ValueError: another step has to end first.
        """
        if not self._steps or self._steps[0][0] is not plan:
            raise ValueError("steps end in the order in which they were scheduled")
        _, blocks = self._steps.popleft()
        for of, owner in self._to_free:
            if of is plan:
                self._pool.release(owner)
        self._to_free = [entry for entry in self._to_free if entry[0] is not plan]
        requests = (*plan.prefills, *plan.decodes)
        return [request if request.block is block else None for request, block in zip(requests, blocks, strict=True)]

    def release(self, request: Request) -> None:
        """Takes back the pages that a request holds, if any: at the end of the last step that may write them."""
        of = next((plan for plan, blocks in reversed(self._steps) if _has(blocks, request.block)), None)
        if of is None:
            release(self._pool, request)
        elif request.pages:
            self._to_free.append((of, request.owner))
            request.pages = []

    def surely_ends(self, request: Request) -> bool:
        """Whether the last step, if this request is in it, leaves its block without masks."""
        block = request.block
        least = 1 if commits_only_first(request, self._logits_shift) else least_to_commit(block, request.params)
        return block.num_masked <= least and _has(self._steps[-1][1], block)


def _has(blocks: list[Block], block: Block) -> bool:
    return any(of is block for of in blocks)
