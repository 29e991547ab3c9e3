"""Self-tuning admission of prefills, in place of a fixed token budget (`token_budget: auto`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

LEAST_SAVING = 0.02
"""The part of the work that one more request at once has to save. Chosen on the simulator."""

JOINED_TOKENS = 512
"""Prefills share a step as far as this holds them: on present GPUs a smaller step is hardly faster."""

_KEPT = 0.999
"""What a measured step still counts one step later: some 1,000 are remembered."""


class AutoBudget:
    """How many whole prefills may join this step's decodes, by what steps have cost so far.

    A prefill waits while `max_older` older requests denoise here; it never waits for younger ones. All
    work has to be done some time. What can be chosen is how many requests share the worker: a step
    has a cost that they divide among them (weights are read, kernels launched), to ever less effect,
    and each of them holds up the others, the oldest too, which are the tail. With such a cost of `a`
    seconds, one more beside `n` saves some `a / n**2` seconds of each decode. Where `d` decodes took
    the worker `t` seconds, prefills included, that is `a * d / t / n**2` of all work; `max_older` is
    the `n` at which it falls to `LEAST_SAVING`. All of this is measured, none of it configured.

    One prefill a step, small ones excepted: decodes ride along for less than in a step of their own.

    Args:
        max_num_seqs: bound on `max_older`, which it is until something has been measured.
        num_older: how many decodes of this step are of older requests than the i-th waiting prefill.
    """

    def __init__(self, max_num_seqs: int, num_older: Callable[[int], int]) -> None:
        self._max_num_seqs = max_num_seqs
        self._num_older = num_older
        self._ran: tuple[int, int] | None = None
        self._last_s = 0.0
        self._all_s = self._all_decodes = 0.0
        self._steps = self._n = self._nn = self._t = self._nt = 0.0  # of decode-only steps, n decodes in t seconds
        self.deficit = 0
        self.max_older = max_num_seqs

    def idle(self) -> None:
        """Nothing is left to run: when the next step is scheduled says nothing about the last one."""
        self._ran = None

    def admit(self, decode_tokens: int, waiting: Sequence[int], has_room: Callable[[int], bool]) -> int:
        """See `TokenBudget.admit`."""
        admitted = tokens = 0
        for size in waiting:
            tokens += size
            if admitted and tokens > JOINED_TOKENS:
                break
            if admitted + self._num_older(admitted) >= self.max_older or not has_room(admitted):
                break
            admitted += 1
        return admitted

    def ran(self, num_prefills: int, num_decodes: int) -> None:
        """A step of that many has ended; the next call of `at` is when."""
        self._ran = num_prefills, num_decodes

    def at(self, now: float) -> None:
        """A step is about to be scheduled. One that has ended since the last call took as long as that is ago."""
        if self._ran is not None:
            self._measure(*self._ran, now - self._last_s)
            self._ran = None
        self._last_s = now

    def _measure(self, num_prefills: int, n: int, seconds: float) -> None:
        self._all_s = self._all_s * _KEPT + seconds
        self._all_decodes = self._all_decodes * _KEPT + n
        if not num_prefills:
            self._steps = self._steps * _KEPT + 1
            self._n = self._n * _KEPT + n
            self._nn = self._nn * _KEPT + n * n
            self._t = self._t * _KEPT + seconds
            self._nt = self._nt * _KEPT + n * seconds
        if self._steps and self._all_s > 0:
            best = math.sqrt(self.fixed_s * self._all_decodes / self._all_s / LEAST_SAVING)
            self.max_older = min(max(round(best), 1), self._max_num_seqs)

    @property
    def fixed_s(self) -> float:
        """Seconds of a decode-only step that its decodes share: the intercept of a line through all of them."""
        if not self._steps:
            return 0.0
        n, t = self._n / self._steps, self._t / self._steps
        variance = self._nn / self._steps - n * n
        # Batches all of one size tell nothing: then all is taken as shared, which admits more.
        slope = (self._nt / self._steps - n * t) / variance if variance > 1e-3 else 0.0
        return max(t - max(slope, 0.0) * n, 0.0)
