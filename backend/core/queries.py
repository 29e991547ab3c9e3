"""Which positions a request's next step computes, by its cache policy.

`logits_shift` is the model's: the prediction for position p is row p - logits_shift (Dream: 1), so that
row has to be among the queries where p may be unmasked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

from backend.core.cache_policy import Recompute
from backend.core.request import Request
from backend.core.unmask_schedule import random_picks

Range = tuple[int, int]
"""Absolute positions [start, end)."""


def is_whole(request: Request, logits_shift: int) -> bool:
    """Whether the next step queries all positions: a prefill or a refresh, never to be split."""
    policy, step = request.params.policy, request.block.step
    if step == 0 or policy.recompute is Recompute.ALL:
        return True
    if policy.recompute is Recompute.UNDECIDED and step == 1 and not logits_shift:
        return True  # dKV-Cache's code for LLaDA has its first cache from this step; for Dream from the prefill
    interval = request.params.cache_refresh_interval
    interval = policy.refresh_interval if interval is None else interval
    return interval > 0 and step % interval == 0


def is_steady(request: Request) -> bool:
    """Whether all denoising steps of a block surely query the same positions."""
    params = request.params
    return params.policy.is_blockwise and not (params.cache_refresh_interval or params.remask_below)


def commits_only_first(request: Request, logits_shift: int) -> bool:
    """Whether the next step unmasks the block's first position, whatever its score, and nothing else.

    With shifted logits that one is predicted by the row before the block, which denoising steps that
    begin at the block do not have (Fast-dLLM's Dream).
    """
    return logits_shift > 0 and request.block.step == 0 and request.params.policy.is_blockwise


def query(request: Request, logits_shift: int) -> list[Range]:
    """The positions of the next step if it is no whole one: ascending ranges, apart from each other."""
    start, end = request.block_start, request.block_start + request.block.length
    recompute = request.params.policy.recompute
    if recompute is Recompute.BLOCK or recompute is Recompute.SUFFIX:
        # No prefill leaves the first position masked; if one did, its row would be needed.
        before = min(logits_shift, start) if request.block.tokens[0] is None else 0
        return [(start - before, end if recompute is Recompute.BLOCK else request.sequence_length)]
    if recompute is Recompute.CANVAS:
        return [(max(len(request.prompt) - logits_shift, 0), request.sequence_length)]
    if recompute is Recompute.UNDECIDED:
        return _undecided(request, logits_shift)
    return _nearby(request, logits_shift)


def num_steady_tokens(request: Request) -> int:
    """Tokens of every denoising step of a steady request, known before its prefill has run."""
    start, end = request.block_start, request.block_start + request.block.length
    return (end if request.params.policy.recompute is Recompute.BLOCK else request.sequence_length) - start


def num_query_tokens(request: Request, logits_shift: int) -> int:
    """Tokens that the next step computes for this request."""
    if is_whole(request, logits_shift):
        return request.sequence_length
    return sum(end - start for start, end in query(request, logits_shift))


def _undecided(request: Request, logits_shift: int) -> list[Range]:
    """All that was masked when the step before began: a token's KV is cached by the first step it is in.

    With shifted logits a position stays as long as the one after it is to be predicted.
    """
    start = request.block_start
    steps = request.block.commit_steps
    # Committed two steps ago or earlier.
    decided = [at is not None and at < request.block.step - 1 for at in steps]
    is_last = start + len(steps) == request.sequence_length
    # Nothing comes after the last position: dKV-Cache's code looks at the one before it instead.
    decided.append(is_last and (len(steps) == 1 or decided[-2]))
    ranges = _runs(start + i for i in range(len(steps)) if not all(decided[i : i + 1 + logits_shift]))
    if logits_shift and start and not decided[0]:
        ranges.insert(0, (start - 1, start))
    if (end := start + len(steps)) < request.sequence_length:
        ranges.append((end, request.sequence_length))
    return _joined(ranges)


def _nearby(request: Request, logits_shift: int) -> list[Range]:
    """dKV-Cache-Greedy: what was just committed, what is committed now, `cache_window` positions around."""
    start = request.block_start
    block = request.block
    before = (request.params.cache_window + 1) // 2
    after = request.params.cache_window // 2
    positions = {start + i for i, at in enumerate(block.commit_steps) if at == block.step - 1}
    for offset in random_picks(block, request.params):
        position = start + offset
        positions.update(range(position - max(before, logits_shift), position + after + 1))
    return _runs(sorted(p for p in positions if 0 <= p < request.sequence_length))


def _runs(positions: Iterable[int]) -> list[Range]:
    """Ascending positions as ranges."""
    key: Callable[[tuple[int, int]], int] = lambda pair: pair[1] - pair[0]  # noqa: E731
    runs = [[p for _, p in group] for _, group in groupby(enumerate(positions), key)]
    return [(run[0], run[-1] + 1) for run in runs]


def _joined(ranges: list[Range]) -> list[Range]:
    joined: list[Range] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined
