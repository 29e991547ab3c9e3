"""Which row of logits predicts which position, where rows predict the position after their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from backend.attention.base import SequenceSpan
from backend.attention.kv_cache import KVCache, PagedSequence
from backend.attention.sdpa import SdpaAttention
from backend.core.block import Block
from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.engine.engine import Engine
from tests.backend.engine.test_engine import DREAM, MASK, mixed_requests, run, small_engine
from tests.backend.engine.test_handover import pair, serve

# No confidence is below 0: everything that is a candidate is committed at once.
EVERYTHING = SamplingParams(24, 24, block_length=8, confidence_threshold=0.0, steps_per_block=8)
PROMPT = [7, 3, 20, 41, 5]


def likeliest(engine: Engine, tokens: Sequence[int], holder: Request | None = None) -> list[int]:
    """What each row of a plain forward over `tokens` says; its KV replaces that of `holder`."""
    positions = torch.arange(len(tokens))
    if holder is None:
        cache = KVCache(2, 8, 8, 2, 8, torch.float32, torch.device("cpu"))
        kv = PagedSequence(cache, range(8), len(tokens))
    else:
        cache = engine.runner.cache
        kv = PagedSequence(cache, holder.pages, len(tokens))
    attention = SdpaAttention(cache, torch.from_numpy(kv.slots), [SequenceSpan(0, len(tokens), kv)])
    model = engine.runner.model
    with torch.inference_mode():
        logits = model.logits(model(torch.tensor(tokens), positions, attention))[:, : DREAM.vocab_size]
        logits[:, MASK] = -torch.inf
    return logits.argmax(dim=-1).tolist()


def start(engine: Engine, request: Request) -> Block:
    """Adds the request, runs its prefill, and returns its block."""
    engine.scheduler.add(request)
    output = engine.step()
    assert output is not None and not output.left and not output.errors
    return request.block


@pytest.mark.parametrize("finished", [[], [9, 8, 7, 6, 5, 4, 3, 2]])
def test_a_prefill_commits_the_first_position_by_the_row_before_the_block(finished: list[int]) -> None:
    engine = small_engine(config=DREAM)
    request = Request("r", PROMPT, EVERYTHING, 0.0, finished_blocks=finished)
    block = start(engine, request)
    before = [*PROMPT, *finished]
    says = likeliest(engine, before + [MASK] * (EVERYTHING.canvas_length - len(finished)))
    assert block.tokens == [says[len(before) - 1]] + [None] * 7


def test_a_denoising_step_commits_the_others_by_the_rows_before_them() -> None:
    engine = small_engine(config=DREAM)
    request = Request("r", PROMPT, EVERYTHING, 0.0)
    block = start(engine, request)
    first = block.tokens[0]
    assert first is not None
    now = [*PROMPT, first, *[MASK] * 23]
    # The KV of a prefill that did not know the first token would give another answer.
    says = likeliest(engine, now, request)
    engine.step()
    assert block.tokens == [first, *says[len(PROMPT) : len(PROMPT) + 7]]


@pytest.mark.parametrize("finished", [[], [9, 8, 7, 6, 5, 4, 3, 2]])
def test_a_first_position_that_is_masked_in_a_denoising_step_is_predicted_by_the_row_before_it(
    finished: list[int],
) -> None:
    """As if the prefill's commit had been lost on the way from another worker."""
    engine = small_engine(config=DREAM)
    request = Request("r", PROMPT, EVERYTHING, 0.0, finished_blocks=finished)
    start(engine, request)
    request.block = Block(request.block.index, 8)
    engine.scheduler.add(Request("n", [1, 2], EVERYTHING, 1.0))
    output = engine.step()
    assert output is not None and output.left == [request]
    before = [*PROMPT, *finished]
    says = likeliest(engine, before + [MASK] * (EVERYTHING.canvas_length - len(finished)))
    assert request.block.tokens == says[len(before) - 1 : len(before) + 7]


def test_the_position_before_all_others_predicts_itself() -> None:
    """The edge refuses an empty prompt; the engine does what Dream's own code does."""
    engine = small_engine(config=DREAM)
    block = start(engine, Request("r", [], EVERYTHING, 0.0))
    assert block.tokens[0] == likeliest(engine, [MASK] * 24)[0]


def test_a_block_of_one_token_is_done_with_its_prefill() -> None:
    engine = small_engine(config=DREAM)
    params = SamplingParams(2, 2, block_length=1, steps_per_block=1)
    engine.scheduler.add(Request("r", PROMPT, params, 0.0))
    output = engine.step()
    assert output is not None and [request.block.num_masked for request in output.left] == [0]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    engine = small_engine(config=DREAM)
    return {k: v for request in mixed_requests(40) for k, v in run(engine, [request]).items()}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("prefill_pages", "pages"), [(600, 600), (60, 40)])
def test_a_block_may_be_prefilled_on_one_worker_and_denoised_on_another(
    alone: dict[str, list[int]], prefill_pages: int, pages: int, overlap: bool
) -> None:
    async def test() -> None:
        async with pair(prefill_pages, pages, overlap, DREAM) as (prefill, colocated):
            requests = mixed_requests(40, revises=False)
            answers = await asyncio.gather(*(serve(prefill, colocated, request) for request in requests))
            assert {r.request_id: a for r, a in zip(requests, answers, strict=True)} == alone
            assert colocated.worker.load.num_transfers > 20

    asyncio.run(asyncio.wait_for(test(), 60))
