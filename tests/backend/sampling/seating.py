"""Requests of all kinds, and what the host's own sampler commits of them: what seats are tested against."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from backend.core.queries import commits_only_first
from backend.core.request import Request
from backend.core.sampling_params import MAX_SEED, UNMASKING, SamplingParams
from backend.sampling import sampler
from backend.sampling.sampler import SamplingBatch
from backend.sampling.seats import FAILED, NOTHING, Seats

FIELDS = ("tokens", "is_masked", "known", "block", "step", "length", "rule", "threshold", "factor", "temperature")
FIELDS += ("seed", "num_steps", "by_timesteps", "only_first")
CPU = torch.device("cpu")


def any_request(
    rng: random.Random,
    longest_block: int,
    vocab_size: int,
    unmasking: str | None = None,
    temperatures: Sequence[float] = (0.0, 0.0, 0.3, 1.2, 1e-6),
) -> Request:
    """With any options that a seat takes, at its first or second step."""
    length = rng.choice([1, 2, longest_block - 1, longest_block])
    params = SamplingParams(
        max_tokens=3 * length,
        canvas_length=3 * length,
        block_length=length,
        unmasking=unmasking or rng.choice(UNMASKING),
        steps_per_block=rng.randint(1, length),
        quota_schedule=rng.choice(("even", "timesteps")),
        confidence_threshold=rng.choice((0.0, 0.2, 0.4, 1.0)),
        factor=rng.choice((0.0, 0.8, 1.5, 4.0)),
        temperature=rng.choice(temperatures),
        seed=rng.choice((0, -1, MAX_SEED, rng.randint(-MAX_SEED - 1, MAX_SEED))),
        cache_policy=rng.choice(("dual", "none")),
    )
    known = [rng.randrange(vocab_size) for _ in range(rng.choice((0, 0, length // 2)))]
    finished = [5] * length * rng.randint(0, 2)
    request = Request(str(rng.random()), [1], params, 0.0, finished_blocks=finished, known=known)
    if rng.random() < 0.3:
        offsets = rng.sample(range(length), rng.randrange(length))
        request.commit([(offset, rng.randrange(vocab_size)) for offset in offsets])
    return request


def places_of(requests: Sequence[Request], longest_block: int, logits_shift: int) -> list[int]:
    """Where a token may be unmasked."""
    places = []
    for row, request in enumerate(requests):
        offsets = [offset for offset, token in enumerate(request.block.tokens) if token is None]
        only_first = commits_only_first(request, logits_shift)
        places += [row * longest_block + offset for offset in offsets if not (only_first and offset)]
    return places


def host_commits(
    requests: Sequence[Request], logits: Tensor, longest_block: int, mask_token_id: int, logits_shift: int
) -> list[list[int]]:
    """One step by `SamplingBatch` of `logits` [B * L, V], in the words of `FusedUnmasker.run`."""
    commits = [[NOTHING] * longest_block for _ in requests]
    only_first = np.array([commits_only_first(request, logits_shift) for request in requests])
    places = places_of(requests, longest_block, logits_shift)
    if places:
        batch = SamplingBatch(requests, longest_block, CPU, only_first)
        choice = batch.choose(logits[places].clone(), mask_token_id, np.array(places))
        for place, token in zip(choice.places.tolist(), choice.tokens.tolist(), strict=True):
            row, offset = divmod(place, longest_block)
            commits[row][offset] = FAILED if token == sampler.FAILED else token
    return commits


def advance(requests: Sequence[Request], commits: Sequence[Sequence[int]]) -> None:
    """Commits a step to all requests that have masks."""
    for request, of_request in zip(requests, commits, strict=True):
        if request.block.num_masked:
            request.commit([(offset, token) for offset, token in enumerate(of_request) if token >= 0])


def assert_seated(seats: Seats, of_seats: Sequence[int], requests: Sequence[Request], mask_token_id: int) -> None:
    """The seats say of their requests what these say themselves."""
    for seat, request in zip(of_seats, requests, strict=True):
        tokens = request.block.tokens
        padding = seats.longest_block - len(tokens)
        expected = [mask_token_id if token is None else token for token in tokens] + [mask_token_id] * padding
        assert seats.tokens[seat].tolist() == expected
        assert seats.is_masked[seat].tolist() == [token is None for token in tokens] + [False] * padding
        assert seats.step[seat] == request.block.step
