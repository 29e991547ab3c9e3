"""What a step computes of a request, against the plainest way to say it."""

from __future__ import annotations

import random

import pytest
import torch

from backend.attention.kv_cache import KVCache
from backend.core.cache_policy import CACHE_POLICIES
from backend.core.queries import is_whole, query
from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.core.unmask_schedule import random_picks
from backend.engine.block_state import BlockState
from backend.models.config import ModelConfig
from tests.backend.engine.test_engine import DREAM, LLADA, MASK


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
@pytest.mark.parametrize("policy", CACHE_POLICIES)
def test_every_step_of_a_block(policy: str, config: ModelConfig) -> None:
    cache = KVCache(1, 40, 8, 1, 4, torch.float32, torch.device("cpu"))
    shift = config.logits_shift
    rng = random.Random(policy)
    for _ in range(20):
        length = rng.choice((1, 4, 16))
        params = SamplingParams(
            3 * length, 3 * length, length, steps_per_block=length, cache_policy=policy, unmasking="random",
            cache_window=rng.randint(0, 3), seed=rng.randint(0, 9),
        )  # fmt: skip
        prompt, finished = [rng.randrange(MASK) for _ in range(rng.randint(1, 30))], rng.randint(0, 2) * length
        request = Request("a", prompt, params, 0.0, finished_blocks=[1] * finished)
        request.pages = rng.sample(range(40), 20)
        state, block, start = BlockState(request, cache, config), request.block, request.block_start
        while block.num_masked:
            of_block = [MASK if token is None else token for token in block.tokens]
            sequence = [*prompt, *request.response, *of_block]
            sequence += [MASK] * (request.sequence_length - len(sequence))
            whole = is_whole(request, shift)
            ranges = [(0, len(sequence))] if whole else query(request, shift)
            positions = [position for begin, end in ranges for position in range(begin, end)]
            part = state.part(whole)
            assert part.positions.tolist() == positions
            assert part.ids.tolist() == [sequence[position] for position in positions]
            assert part.slots.tolist() == [request.pages[p // 8] * 8 + p % 8 for p in positions]
            predictors = [max(start + offset - shift, 0) for offset in range(length)]
            candidates = range(1) if part.only_first else range(length)
            assert part.is_masked.tolist() == [
                offset in candidates and block.tokens[offset] is None and predictors[offset] in positions
                for offset in range(length)
            ]
            masked = part.is_masked.nonzero()[0].tolist()
            assert [positions[row] for row in part.logit_rows[masked]] == [predictors[offset] for offset in masked]
            commits = [0] if part.only_first else random_picks(block, params)
            assert set(commits) <= set(masked), "what this step commits is predicted"
            request.commit([(offset, 5) for offset in commits])
            for offset in commits:
                state.commit(offset, 5)
