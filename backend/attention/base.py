"""The one interface through which a model's layers reach the KV cache and the attention kernel."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Attention(Protocol):
    """Attention over one packed batch; made anew for each forward.

    Shapes: T packed query tokens of all sequences, H heads, K KV heads, E head size.
    """

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Stores `key` and `value` [T, K, E] in the cache, then lets `query` [T, H, E] attend.

        Every query sees all positions of its own sequence, cached or just written, and nothing of
        any other sequence. Keys arrive rotated. Returns [T, H, E].
        """
        ...
