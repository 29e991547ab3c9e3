"""What users of other engines met, and cannot meet here: the cases that are the engine's.

Those of serving, and where the later ones are tested, stand in tests/e2e/test_field_cases.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.attention.base import SequenceSpan
from backend.attention.kv_cache import KVCache, PagedSequence
from backend.attention.sdpa import SdpaAttention
from backend.core.request import Request, RequestStatus
from backend.core.sampling_params import SamplingParams
from backend.core.step import StepPlan, StepResult
from backend.engine.engine import Engine
from backend.models.config import ModelConfig
from tests.backend.engine.test_engine import DREAM, LLADA, MASK, mixed_requests, run, small_engine


def request(name: str, prompt: int | Sequence[int], max_tokens: int, **options: Any) -> Request:
    """With a prompt of its own of that length; a token a step unless it says otherwise."""
    rng = random.Random(name)
    ids = [rng.randrange(MASK) for _ in range(prompt)] if isinstance(prompt, int) else prompt
    block = options.setdefault("block_length", 8)
    options = {
        "canvas_length": -(-max_tokens // block) * block,
        "unmasking": "quota",
        "steps_per_block": block,
    } | options
    return Request(name, ids, SamplingParams(max_tokens, **options), 0.0)


def alone(make: Callable[[], list[Request]]) -> dict[str, list[int]]:
    engine = small_engine()
    return {name: answer for one in make() for name, answer in run(engine, [one]).items()}


def watch(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Filled with the token ids and the positions of every forward."""
    seen: list[tuple[list[int], list[int]]] = []
    model = engine.runner.model
    forward = model.forward

    def watched(token_ids: Tensor, positions: Tensor, attention: SdpaAttention) -> Tensor:
        seen.append((token_ids.tolist(), positions.tolist()))
        return forward(token_ids, positions, attention)

    model.forward = watched  # type: ignore[method-assign]
    return seen


def love_the_mask(engine: Engine) -> None:
    """Makes the mask the likeliest token everywhere."""
    model = engine.runner.model
    logits = model.logits

    def loving(hidden: Tensor) -> Tensor:
        out = logits(hidden)
        out[:, MASK] = out.amax() + 10.0
        return out

    model.logits = loving  # type: ignore[method-assign]


def test_field_case_02_a_longer_neighbour_shifts_no_position() -> None:
    def make() -> list[Request]:
        return [request("short", 3, 8), request("long", 60, 8)]

    engine = small_engine()
    seen = watch(engine)
    assert run(engine, make()) == alone(make)
    assert seen[0][1][: 11 + 68] == [*range(11), *range(68)]
    assert {tuple(positions[:16]) for _, positions in seen[1:8]} == {(*range(3, 11), *range(60, 68))}


def test_field_case_03_cached_blocks_of_a_batch_keep_their_own_keys_and_values() -> None:
    def make() -> list[Request]:
        return [
            request(f"{policy} {prompt}", prompt, 24, cache_policy=policy)
            for policy in ("dual", "prefix")
            for prompt in (1, 7, 8, 40)
        ]

    answers = alone(make)
    assert run(small_engine(tau=10_000), make()) == answers, "all blocks in step"
    assert run(small_engine(tau=40), make()) == answers, "blocks of all ages"


@pytest.mark.parametrize(("max_tokens", "block"), [(5, 3), (1, 3), (7, 4), (13, 8), (2, 32)])
def test_field_case_04_any_length_by_any_block_length_and_finished_is_finished(max_tokens: int, block: int) -> None:
    engine = small_engine()
    whole = -(-max_tokens // block) * block
    # The tail is there to be seen, and nothing else: what comes before it is the same with and without it.
    full = run(engine, [request("short", 9, whole, block_length=block)])["short"]
    engine.scheduler.add(request("short", 9, max_tokens, block_length=block))
    engine.scheduler.add(request("long", 4, 64, block_length=block, canvas_length=96 // block * block))
    finished: dict[str, list[int]] = {}
    while engine.scheduler.has_work:
        output = engine.step()
        assert output is not None
        assert not finished.keys() & {r.request_id for r in (*output.plan.prefills, *output.plan.decodes)}
        for left in output.left:
            if left.status.is_finished:
                finished[left.request_id] = left.answer()[0]
            else:
                left.next_block()
                engine.scheduler.add(left)
    assert finished["short"] == full[:max_tokens] and len(finished["short"]) == max_tokens


def test_field_case_04_a_step_is_not_run_for_the_tail_alone() -> None:
    engine = small_engine()
    requests = [request(str(i), 9, 1) for i in range(10)]
    assert all(len(answer) == 1 for answer in run(engine, requests).values())
    assert any(r.block.num_masked for r in requests), "they end with the first position, whenever it is committed"


def test_field_case_05_no_block_after_the_end_of_text_is_computed() -> None:
    engine = small_engine()
    seen = watch(engine)
    free = request("r", 9, 32)
    unbound = run(engine, [free])["r"]
    num_forwards = len(seen)
    end = unbound[2]
    seen.clear()
    bound = request("r", 9, 32, stop_token_ids=(end,))
    answer = run(engine, [bound])["r"]
    assert bound.status is RequestStatus.FINISHED_STOP
    assert answer == unbound[: unbound.index(end)]
    assert len(seen) == bound.block.step <= 8 < num_forwards == 32


def test_field_case_06_the_canvas_is_what_was_asked_for_whatever_runs_beside_it() -> None:
    def make() -> list[Request]:
        return [request("r", [1, 2, 3], 10, canvas_length=48), request("other", 5, 64), request("third", 30, 8)]

    engine = small_engine(tau=10_000)
    seen = watch(engine)
    assert run(engine, make()) == alone(make)
    assert seen[0][0][: 51 + 69] == [1, 2, 3] + [MASK] * 48 + list(make()[1].prompt) + [MASK] * 64


def likelihoods(engine: Engine, tokens: Sequence[int]) -> Tensor:
    """What each row of a plain forward over `tokens` says, [T, V]; the mask is impossible."""
    cache = KVCache(2, 16, 8, 2, 8, torch.float32, torch.device("cpu"))
    positions = torch.arange(len(tokens))
    kv = PagedSequence(cache, range(16), len(tokens))
    attention = SdpaAttention(cache, positions, [SequenceSpan(0, len(tokens), kv)])
    model = engine.runner.model
    with torch.inference_mode():
        logits = model.logits(model(torch.tensor(tokens), positions, attention))[:, : LLADA.vocab_size]
        logits[:, MASK] = -torch.inf
        return logits.softmax(dim=-1)


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
@pytest.mark.parametrize("gain", [1.0, 1e4])
def test_field_case_08_temperature_0_is_the_arg_max_and_never_nan(temperature: float, gain: float) -> None:
    engine = small_engine()
    model = engine.runner.model
    logits = model.logits
    model.logits = lambda hidden: logits(hidden) * gain  # type: ignore[method-assign]
    prompt = [7, 3, 20, 41, 5]
    expected = likelihoods(engine, prompt + [MASK] * 32).argmax(dim=-1).tolist()[5:]
    for seed in (0, 1):
        everything = {"unmasking": "threshold", "confidence_threshold": 0.0, "block_length": 32}
        asked = request("r", prompt, 32, temperature=temperature, seed=seed, top_p=0.7, top_k=3, **everything)
        assert run(engine, [asked]) == {"r": expected}


@pytest.mark.parametrize("options", [
    {"cache_policy": "none"}, {"cache_policy": "dual", "cache_refresh_interval": 1}, {"cache_policy": "dkv-prefill",
    "cache_refresh_interval": 1},
])  # fmt: skip
def test_field_case_10_dreams_rows_are_shifted_at_every_block_and_after_every_refresh(options: dict[str, Any]) -> None:
    """Against Dream's decoding without a cache, written plainly. Its defaults: tests/backend/models/test_dream.py."""
    engine = small_engine(config=DREAM)
    prompt, block = [7, 3, 20, 41, 5], 8
    ids = prompt + [MASK] * 24
    for start in range(len(prompt), len(ids), block):
        masked = list(range(start, start + block))
        while masked:
            chance, token = likelihoods(engine, ids).max(dim=-1)
            # With "dual" the prefill commits the block's first token, as Fast-dLLM's does.
            is_prefill = len(masked) == block and options["cache_policy"] == "dual"
            best = start if is_prefill else max(masked, key=lambda p: (chance[p - 1].item(), -p))
            ids[best] = int(token[best - 1])
            masked.remove(best)
    assert run(engine, [request("r", prompt, 24, **options)]) == {"r": ids[len(prompt) :]}


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_field_case_11_the_mask_is_never_a_token_and_every_block_ends(config: ModelConfig) -> None:
    """Every cache policy and rule of unmasking, with a model that wants nothing but masks."""
    engine = small_engine(config=config)
    love_the_mask(engine)
    requests = mixed_requests(40)
    for asked in requests:
        engine.scheduler.add(asked)
    while engine.scheduler.has_work:
        output = engine.step()
        assert output is not None and not output.errors
        for left in output.left:
            assert MASK not in left.block.tokens
            assert left.block.step <= left.params.max_steps_per_block
            if not left.status.is_finished:
                left.next_block()
                engine.scheduler.add(left)


def test_field_case_16_a_block_that_cannot_end_fails_loudly_and_alone() -> None:
    engine = small_engine()
    forward = engine.runner.run

    def stuck(plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepResult:
        result = forward(plan, on_layer)
        names = [r.request_id for r in (*plan.prefills, *plan.decodes)]
        return StepResult([[] if name == "stuck" else c for name, c in zip(names, result.commits, strict=True)])

    engine.runner.run = stuck  # type: ignore[method-assign]
    expected = alone(lambda: [request("fine", 9, 64)])["fine"]
    for name in ("stuck", "fine"):
        engine.scheduler.add(request(name, 9, 64))
    errors: dict[str, str] = {}
    while engine.scheduler.has_work:
        output = engine.step()
        assert output is not None
        errors |= output.errors
        for left in output.left:
            if not left.status.is_finished:
                left.next_block()
                engine.scheduler.add(left)
            elif left.request_id == "fine":
                assert left.answer()[0] == expected
    assert errors == {"stuck": "block 0 still has 8 masks after 24 steps"}
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages


@pytest.mark.parametrize("seed", range(4))
def test_field_case_15_pages_balance_after_any_mix_of_ends_and_aborts(seed: int) -> None:
    """Failed transfers too: test_scheduler.py's and test_handover.py's mixes."""
    rng = random.Random(seed)
    engine = small_engine(tau=150, seqs=6, pages=80)
    scheduler = engine.scheduler
    waiting, live = mixed_requests(40), dict[str, Request]()
    num_aborted = num_done = 0
    while waiting or live:
        if waiting and rng.random() < 0.5:
            new = waiting.pop()
            live[new.request_id] = new
            scheduler.add(new)
        if live and rng.random() < 0.1:
            name = rng.choice(sorted(live))
            assert scheduler.abort(name) is live.pop(name) and scheduler.abort(name) is None
            num_aborted += 1
        output = engine.step()
        assert (output is not None) == bool(live), "it is idle if, and only if, there is nothing to do"
        for left in output.left if output is not None else ():
            if left.status.is_finished:
                del live[left.request_id]
                num_done += 1
            else:
                left.next_block()
                scheduler.add(left)
        scheduler.pool.check()
    assert num_aborted + num_done == 40 and min(num_aborted, num_done) > 5
    assert scheduler.pool.num_free == scheduler.pool.num_pages and not scheduler.has_work
