"""What a step recomputes and which KV it may reuse, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from backend.core.request import Request
from backend.core.sampling_params import InvalidRequestError


@dataclass(frozen=True)
class CachePolicy:
    """An approximate KV cache.

    A prefill writes KV for all positions of prompt + canvas and commits in the current block by its
    own logits. A denoising step queries the block, attends to all positions and overwrites the
    block's KV. All KV is dropped at the block boundary.

    Attributes:
        name: the request option `cache_policy`.
    """

    name: str

    def prefill_tokens(self, request: Request) -> int:
        return request.sequence_length

    def denoising_tokens(self, request: Request) -> int:
        return request.params.block_length


# Fast-dLLM's DualCache: the KV of the prefix and of the masked suffix are both kept during a block.
CACHE_POLICIES = {policy.name: policy for policy in (CachePolicy("dual"),)}


def cache_policy(name: str) -> CachePolicy:
    """Raises InvalidRequestError for a name that is not in `CACHE_POLICIES`."""
    try:
        return CACHE_POLICIES[name]
    except KeyError:
        raise InvalidRequestError(f"cache_policy={name!r} is not known; allowed: {', '.join(CACHE_POLICIES)}") from None
