"""A token budget that remembers what was overspent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from backend.core.budget import TokenBudget
from backend.core.scheduler import Scheduler
from benchmarks.simulator.graph import Graph


class DebtBudget(TokenBudget):
    """Algorithm 1 with a deficit that may be negative, down to `-max_debt`.

    An oversized prefill that an idle step admits, and decodes over the budget, are paid back by the
    steps after them, those without a waiting prefill included.
    """

    def __init__(self, token_budget: int, max_debt: int) -> None:
        super().__init__(token_budget)
        self.max_debt = max_debt
        self.least_deficit = -max_debt

    def admit(self, decode_tokens: int, waiting: Sequence[int], has_room: Callable[[int], bool]) -> int:
        if waiting:
            return super().admit(decode_tokens, waiting, has_room)
        self.deficit = max(min(self.token_budget - decode_tokens + self.deficit, 0), -self.max_debt)
        return 0


@dataclass(frozen=True)
class Debt:
    """Attributes:
    max_debt: of every colocated worker, in token budgets.
    """

    max_debt: int

    def __call__(self, *args: Any) -> Graph:
        graph = Graph(*args)
        for worker in graph.workers:
            if isinstance(worker.scheduler, Scheduler) and isinstance(worker.scheduler.budget, TokenBudget):
                token_budget = worker.scheduler.budget.token_budget
                worker.scheduler.budget = DebtBudget(token_budget, self.max_debt * token_budget)
        return graph
