"""The one interface through which a model's layers reach the KV cache and the attention kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from backend.attention.kv_cache import PagedSequence


class AttentionUnavailableError(RuntimeError):
    """The attention backend that was asked for cannot run here; the message says why and what would."""


@dataclass(frozen=True)
class SequenceSpan:
    """One sequence of a packed batch: its query rows, in the order of their positions, and where its KV lies."""

    query_start: int
    query_end: int
    kv: PagedSequence

    @property
    def is_whole(self) -> bool:
        """Whether the query covers all positions, as a prefill does."""
        return self.query_end - self.query_start == self.kv.length


class Attention(Protocol):
    """Attention over one packed batch.

    Shapes: T packed query tokens of all sequences, H heads, K KV heads, E head size.
    """

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Stores `key` and `value` [T, K, E] in the cache, then lets `query` [T, H, E] attend.

        Every query sees all positions of its own sequence, cached or just written, and nothing of
        any other sequence. Keys arrive rotated. Returns [T, H, E].
        """
        ...


class GraphAttention(Attention, Protocol):
    """Attention whose kernels can be captured once and replayed: B sequences of L query tokens, always.

    What changes between replays lies in buffers of fixed addresses. `plan` and the replays belong on one
    stream, and `attend` has to run once, for every layer's kernels to be loaded, before it is captured.
    """

    def plan(self, sequences: Sequence[PagedSequence]) -> bool:
        """Sets what the next `attend`s read: at most B sequences; the rows that are left read scratch.

        A row whose sequence is the very object that it had is not touched. False: none was.
        """
        ...


class AttentionBackend(Protocol):
    """What attends over one worker's KV cache. One thread."""

    def begin(
        self, slots: Tensor, spans: Sequence[SequenceSpan], on_layer: Callable[[int], None] | None = None
    ) -> Attention:
        """Plans one forward; good until the next `begin`.

        Args:
            slots: where each packed token's KV is written, int64 [T].
            spans: ascending and without gaps; rows past the last one are padding, their results of no use.
            on_layer: called with a layer's index when the KV of all packed tokens is written there: on
                CUDA when that is on its way, in the order of the current stream.
        """
        ...

    def graph_attention(
        self, num_sequences: int, query_length: int, max_sequence_length: int, slots: Tensor
    ) -> GraphAttention:
        """B and L of `GraphAttention`, and the longest sequence in tokens.

        Args:
            slots: where each packed token's KV is written, int64 [B * L]; read by every `attend`.
        """
        ...
