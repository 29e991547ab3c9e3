"""What a step recomputes and which KV it may reuse, as plain data."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Recompute(enum.Enum):
    """The positions that a denoising step queries; it attends to all, and reads the others from the cache."""

    BLOCK = enum.auto()
    """The current block."""
    SUFFIX = enum.auto()
    """The current block and everything after it."""
    ALL = enum.auto()
    CANVAS = enum.auto()
    """All but the prompt."""
    UNDECIDED = enum.auto()
    """All that has not been queried as a token: a token is cached one step after its commit."""
    NEARBY = enum.auto()
    """The tokens of the step before, the positions that this step commits, and a window around them."""


@dataclass(frozen=True)
class CachePolicy:
    """An approximate KV cache.

    The block's first step is a prefill: it queries all positions and writes KV for all. So is every
    `refresh_interval`-th step after it. Any other step queries what `recompute` says and overwrites its
    KV in place. At the block boundary all KV is dropped.

    Attributes:
        name: the request option `cache_policy`.
        refresh_interval: of requests that name none; 0 is never.
    """

    name: str
    recompute: Recompute
    refresh_interval: int = 0

    @property
    def is_blockwise(self) -> bool:
        """Whether denoising steps begin at the block, so that what lies before it is never queried."""
        return self.recompute in (Recompute.BLOCK, Recompute.SUFFIX)


CACHE_POLICIES = {
    policy.name: policy
    for policy in (
        CachePolicy("none", Recompute.ALL),
        # Fast-dLLM's PrefixCache and DualCache.
        CachePolicy("prefix", Recompute.SUFFIX),
        CachePolicy("dual", Recompute.BLOCK),
        # dKV-Cache's three variants.
        CachePolicy("dkv-decode", Recompute.UNDECIDED, refresh_interval=8),
        CachePolicy("dkv-prefill", Recompute.CANVAS),
        CachePolicy("dkv-greedy", Recompute.NEARBY, refresh_interval=2),
    )
}
