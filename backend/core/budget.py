"""The deficit token budget (paper section 4.1, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Budget(Protocol):
    """Says how many of the waiting prefills a step takes; `TokenBudget` says what the methods mean."""

    deficit: int

    def idle(self) -> None: ...
    def admit(self, decode_tokens: int, waiting: Sequence[int], has_room: Callable[[int], bool]) -> int: ...


class TokenBudget:
    """How many whole prefills may join this step's decodes.

    Unused budget is carried forward as `deficit` while prefills wait, so that a prefill larger than
    the budget left is admitted after a bounded number of steps, and over W steps with prefills
    waiting at most W * token_budget - sum(decode tokens) prefill tokens are admitted (idle
    admissions and steps whose decodes exceed the budget excepted: debt is forgiven).

    Args:
        least_allowance: what a step earns at least. Algorithm 1 has no such thing and starves prefills for as
            long as decodes fill the budget. Where these came through it themselves, that soon ends; not where
            prefill workers hand them over.
    """

    least_deficit = 0

    def __init__(self, token_budget: int, least_allowance: int | None = None) -> None:
        if token_budget < 1:
            raise ValueError(f"token_budget={token_budget} must be at least 1")
        self.token_budget = token_budget
        self.least_allowance = least_allowance
        self.deficit = 0

    def idle(self) -> None:
        """Nothing is left to run: no prefill waits, so nothing is carried."""
        self.deficit = 0

    def admit(self, decode_tokens: int, waiting: Sequence[int], has_room: Callable[[int], bool]) -> int:
        """How many prefills from the head of the queue run in this step; moves the deficit on.

        Args:
            decode_tokens: tokens of the decodes of this step, which are never displaced.
            waiting: tokens of each waiting prefill, in order of request arrival.
            has_room: whether the i-th waiting prefill finds pages and a seat; called in order, once
                for each prefill that the budget admits, and may reserve them.
        """
        if not waiting:
            self.idle()
            return 0
        budget = self.token_budget - decode_tokens
        if self.least_allowance is not None:
            budget = max(budget, self.least_allowance)
        budget += self.deficit
        admitted = 0
        for tokens in waiting:
            idle = decode_tokens == 0 and admitted == 0
            if tokens > budget and not idle:
                break
            if not has_room(admitted):
                # Stopped by memory, not by the budget: this step's allowance is not earned, or else
                # a memory stall would turn into a burst of prefills that stalls decodes later.
                budget = min(budget, self.deficit)
                break
            budget -= tokens
            admitted += 1
        # Algorithm 1 alone lets the deficit grow without end while every step finds a prefill and
        # admits it; nothing that waits ever needs more than its own size and one allowance.
        self.deficit = min(max(budget, self.least_deficit), self.token_budget + max(waiting))
        return admitted
