"""Logits of the masked positions of a whole batch -> commits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.core.logprobs import TokenLogprobs
from backend.core.request import Request
from backend.core.unmask_schedule import even, num_to_commit
from backend.sampling.draw import top_probability
from backend.sampling.early_stops import EarlyStops, has_early_stops
from backend.sampling.logprobs import token_logprobs
from backend.sampling.special import SpecialRows, is_special
from backend.sampling.unmask import by_factor, by_quota, by_threshold

_BY_THRESHOLD = ("threshold", "paced_threshold")

FAILED = -1
"""Stands in the place of a token whose logits were not finite."""


class Choice(NamedTuple):
    """What one step commits, in M places.

    Attributes:
        places: int64 [M], ascending; a place is `request row * L + offset in its block`.
        tokens: int64 [M], or FAILED.
        logits: float32 [M, V] of these places; -inf where a token was no candidate.
    """

    places: NDArray[np.int64]
    tokens: NDArray[np.int64]
    logits: Tensor


class SamplingBatch:
    """The sampling options of B requests; kept from step to step while the same requests run.

    Args:
        only_first: bool [B], whose one candidate is committed whatever its rule says.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        longest_block: int,
        device: torch.device,
        only_first: NDArray[np.bool_] | None = None,
    ) -> None:
        params = [request.params for request in requests]
        self._requests = requests
        self._params = params
        self._device = device
        self._shape = (len(requests), longest_block)
        self._dense = np.empty(self._shape, dtype=np.float32)
        self._places = self._dense.reshape(-1)
        # No score reaches 2: a row of another rule gets its best position by the threshold rule, and
        # whatever it takes beyond that by its own.
        self._threshold = np.array(
            [p.confidence_threshold if p.unmasking in _BY_THRESHOLD else 2.0 for p in params], dtype=np.float32
        )
        self._paced_rows = [i for i, p in enumerate(params) if p.unmasking == "paced_threshold"]
        self._factor_rows = [i for i, p in enumerate(params) if p.unmasking == "factor"]
        self._factor = np.array([params[row].factor for row in self._factor_rows])
        must = only_first if only_first is not None else np.zeros(len(params), dtype=bool)
        self._quota_rows = [
            i for i, p in enumerate(params) if p.unmasking not in ("factor", *_BY_THRESHOLD) and not must[i]
        ]
        self._early_stops = EarlyStops(requests, device) if any(map(has_early_stops, requests)) else None
        self._num_top = None
        if any(p.logprobs is not None or p.remask_below for p in params):
            self._num_top = np.array(
                [p.logprobs or 0 if p.logprobs is not None or p.remask_below else -1 for p in params]
            )
        self._special = SpecialRows(requests, device) if any(map(is_special, params)) else None
        self._known: NDArray[np.int64] | None = None
        """By place, the token that an earlier attempt already streamed there, or -1."""
        if any(request.block.known for request in requests):
            known = np.full(self._shape, -1)
            for row, request in zip(known, requests, strict=True):
                row[: len(request.block.known)] = request.block.known
            self._known = known.ravel()

    def choose(self, logits: Tensor, mask_token_id: int, masked: NDArray[np.int64]) -> Choice:
        """The commits of one step.

        Every request with a masked position commits at least one, so every step makes progress, unless
        its quota for this step is 0, which ends with its steps. The mask token is never a candidate. A token
        that an earlier attempt already streamed (`Block.known`) stands.

        Args:
            logits: [N, V] of the masked positions, overwritten.
            masked: the place of each row of logits, [N], ascending.
        """
        logits = logits.float()
        logits[:, mask_token_id] = -torch.inf
        if self._early_stops is not None:
            self._early_stops.ban(logits, *np.divmod(masked, self._shape[1]))
        confidence = top_probability(logits)
        score, drawn = confidence, None
        if self._special is not None:
            score, drawn = self._special.judge(logits, confidence, *np.divmod(masked, self._shape[1]))
        score = score.cpu()
        likelihood = score.numpy()
        broken = None
        # By torch: numpy's first sum after a forward costs 0.04 ms.
        if not math.isfinite(score.sum().item()) or (self._special is not None and bool(confidence.isnan().any())):
            # A broken row outranks all others, so that its request is sure to hear of it in this step.
            broken = confidence.isnan().numpy(force=True)
            likelihood = np.where(broken, np.inf, likelihood)
        picked = self._unmask(likelihood, masked)
        # The arg max is only wanted where it is committed; ties go to the lower id.
        chosen_logits = logits.index_select(0, torch.from_numpy(picked).to(self._device))
        tokens = chosen_logits.argmax(dim=-1).numpy(force=True)
        if drawn is not None:
            tokens = np.where(drawn[picked] >= 0, drawn[picked], tokens)
        places = masked[picked]
        if self._known is not None:
            known = self._known[places]
            tokens = np.where(known >= 0, known, tokens)
        if broken is not None:
            tokens[broken[picked]] = FAILED
        return Choice(places, tokens, chosen_logits)

    def logprobs(self, choice: Choice) -> dict[str, list[TokenLogprobs]]:
        """Request id -> of each of its commits in `choice`; of requests that need them and did not fail."""
        told: dict[str, list[TokenLogprobs]] = {}
        if self._num_top is None:
            return told
        rows = choice.places // self._shape[1]
        asked = ((self._num_top[rows] >= 0) & (choice.tokens != FAILED)).nonzero()[0]
        if len(asked):
            num_top = self._num_top[rows[asked]]
            tokens = torch.from_numpy(choice.tokens[asked]).to(self._device)
            judged = token_logprobs(choice.logits[torch.from_numpy(asked).to(self._device)], tokens, int(num_top.max()))
            for row, count, of in zip(rows[asked].tolist(), num_top.tolist(), judged, strict=True):
                told.setdefault(self._requests[row].request_id, []).append(of._replace(top=of.top[:count]))
        return told

    def _unmask(self, score: NDArray[np.float32], masked: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which of the N masked positions are committed, by each request's own rule."""
        dense = self._dense
        dense.fill(-np.inf)
        self._places[masked] = score
        chosen = by_threshold(dense, self._threshold)
        if self._factor_rows:
            chosen[self._factor_rows] = by_factor(dense[self._factor_rows], self._factor)
        if self._quota_rows:
            counts = [num_to_commit(self._requests[row].block, self._params[row]) for row in self._quota_rows]
            if counts.count(1) < len(counts):
                of_rows = dense[self._quota_rows]
                is_broken = (of_rows == np.inf).any(axis=1)  # no quota of nothing hides that
                chosen[self._quota_rows] = by_quota(of_rows, np.maximum(counts, is_broken))
        if self._paced_rows:
            caps = np.array([_pace(self._requests[row]) for row in self._paced_rows])
            chosen[self._paced_rows] &= by_quota(dense[self._paced_rows], caps)
        return chosen.ravel().take(masked).nonzero()[0]


def _pace(request: Request) -> int:
    """What `quota_schedule: even` would have committed by the end of this step and is not committed yet."""
    block, steps = request.block, request.params.steps_per_block
    due = sum(even(block.length, steps, step) for step in range(min(block.step + 1, steps)))
    return max(due - (block.length - block.num_masked), 1)
