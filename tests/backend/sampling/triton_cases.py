"""The Triton kernels against torch, on a GPU or by Triton's interpreter: `test_triton_unmask.py` runs this."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from backend.core import counter_random
from backend.core.counter_random import ORDER
from backend.core.request import Request
from backend.core.sampling_params import MAX_SEED, UNMASKING, SamplingParams
from backend.sampling import dense_unmask
from backend.sampling.fused import FusedUnmasker
from backend.sampling.seats import FAILED, NOTHING, Seats
from backend.sampling.triton_rows import uniform
from backend.sampling.triton_unmask import TILE, UnmaskKernels
from tests.backend.sampling.seating import FIELDS, any_request

# numpy says where the interpreter computes with NaN and infinities, as the kernels mean to.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")


class Both:
    """The same requests in two sets of seats, one for torch and one for Triton; seat 0 is nobody's."""

    def __init__(
        self, requests: Sequence[Request], longest_block: int, vocab_size: int, mask_token_id: int, tile: int,
        logits_shift: int = 0,
    ) -> None:  # fmt: skip
        batch = len(requests) + 1
        self.mask_token_id, self.vocab_size = mask_token_id, vocab_size
        self.seats, self.torch_seats = (
            Seats(batch, longest_block, DEVICE, mask_token_id=mask_token_id, logits_shift=logits_shift)
            for _ in range(2)
        )
        for seats in (self.seats, self.torch_seats):
            seats.take(range(1, batch), requests)
        self.seat_of = torch.arange(batch, dtype=torch.int32, device=DEVICE)
        num_places = batch * longest_block
        self.kernels = UnmaskKernels(num_places, batch, longest_block, vocab_size, mask_token_id, DEVICE, tile)
        self.commits = torch.empty(batch, longest_block, dtype=torch.int32, device=DEVICE)

    def candidates(self) -> Tensor:
        """The places where a token may be unmasked, and two rows of padding."""
        may_unmask = dense_unmask.candidates(self.seats, self.seat_of.long())
        return dense_unmask.compact(may_unmask, int(may_unmask.sum()) + 2).int()

    def step(self, logits: Tensor, place: Tensor) -> Tensor:
        """Both ways, which have to be the same. Returns the commits [B, L]."""
        columns = logits[:, : self.vocab_size]
        expected = dense_unmask.unmask(columns, place.long(), self.seat_of.long(), self.torch_seats, self.mask_token_id)
        self.kernels.unmask(logits, place, self.seat_of, self.seats, self.commits)
        assert self.commits.tolist() == expected.tolist()
        for field in FIELDS:
            assert torch.equal(getattr(self.seats, field), getattr(self.torch_seats, field)), field
        return self.commits[1:]


def random_logits(seed: int, rows: int, columns: int, scale: float = 3.0) -> Tensor:
    """Every other row is like the one before it, but for one token."""
    logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale
    logits[1::2] = logits[: rows - rows % 2 : 2]
    logits[1::4, 3] = -torch.inf
    return logits.to(DEVICE)


def request(length: int, done: Sequence[int] = (), **options: object) -> Request:
    params = SamplingParams(length, length, length, **{"steps_per_block": length, **options})  # type: ignore[arg-type]
    one = Request("r", [1], params, 0.0)
    if done:
        one.commit([(offset, 2) for offset in done])
    return one


@triton.jit
def _uniforms(out, seed, block, step, position, stream, N: tl.constexpr):
    i = tl.arange(0, N)
    number = uniform(tl.load(seed + i), tl.load(block + i), tl.load(step + i), tl.load(position + i), stream)
    tl.store(out + i, number)


@pytest.mark.parametrize("stream", [0, ORDER])
def test_numbers_are_the_core_s(stream: int) -> None:
    rng = random.Random(0)
    seeds = [0, -1, MAX_SEED, -MAX_SEED - 1] + [rng.randint(-MAX_SEED - 1, MAX_SEED) for _ in range(12)]
    counters = [(seed, rng.randrange(2**31), rng.randrange(700), rng.randrange(256)) for seed in seeds]
    columns = [torch.tensor(column, device=DEVICE) for column in zip(*counters, strict=True)]
    out = torch.empty(16, dtype=torch.float64, device=DEVICE)
    _uniforms[(1,)](out, columns[0], *(column.int() for column in columns[1:]), stream, 16)
    assert out.tolist() == [counter_random.uniform(*counter, stream=stream) for counter in counters]


@pytest.mark.parametrize(("temperature", "logits_shift"), [(0.0, 1), (0.8, 0)])
def test_whole_blocks_by_every_rule(temperature: float, logits_shift: int) -> None:
    rng = random.Random(logits_shift)
    temperatures = (0.0,) if not temperature else (temperature, temperature, 1e-310)
    requests = [any_request(rng, 3, 50, unmasking, temperatures) for unmasking in UNMASKING]
    requests.append(request(3, unmasking="quota", quota_schedule="timesteps", temperature=temperature))
    both = Both(requests, 3, 50, mask_token_id=33, tile=32, logits_shift=logits_shift)
    for step in range(9):
        place = both.candidates()
        both.step(random_logits(step, len(place), 50), place)
        if not both.seats.is_masked.any():
            break
    else:
        pytest.fail("three steps of schedules that may begin with nothing, and three positions")


def test_schedules_of_a_block_that_its_steps_do_not_divide() -> None:
    options: list[dict[str, object]] = [
        {"unmasking": "paced_threshold", "confidence_threshold": 0.0},
        {"unmasking": "quota"},
        {"unmasking": "quota", "quota_schedule": "timesteps"},
        {"unmasking": "paced_threshold", "confidence_threshold": 1.0},
    ]
    requests = [request(8, steps_per_block=3, **one) for one in options]
    requests.append(request(8, range(5), **options[0]))  # ahead of its schedule
    both = Both(requests, 8, 20, mask_token_id=5, tile=32)
    counts = []
    for step in range(3):
        place = both.candidates()
        commits = both.step(random_logits(step, len(place), 20), place)
        counts.append((commits >= 0).sum(dim=1).tolist())
    assert counts == [[3, 3, 2, 1, 1], [3, 3, 2, 1, 1], [2, 2, 4, 1, 1]]


@pytest.mark.parametrize(("dtype", "vocab_size", "tile"), [(torch.bfloat16, 1000, 256), (torch.float16, 5000, TILE)])
def test_many_tiles_long_blocks_and_padded_columns(dtype: torch.dtype, vocab_size: int, tile: int) -> None:
    """Blocks of 70, of which 32 offsets are compared at a time, and a tile that is drawn from in parts."""
    masked = (0, 5, 31, 32, 33, 50, 69)
    done = [offset for offset in range(70) if offset not in masked]
    options = [
        {"unmasking": "threshold", "confidence_threshold": 0.05},
        {"unmasking": "factor", "factor": 2.6, "temperature": 1.0},
        {"unmasking": "entropy", "steps_per_block": 20},
        {"unmasking": "threshold", "confidence_threshold": 0.0, "temperature": 1.5},  # shows all that is drawn
    ]
    both = Both([request(70, done, **one) for one in options], 70, vocab_size, vocab_size - 1, tile)
    place = both.candidates()
    logits = random_logits(2, len(place), vocab_size + 8)
    logits[:, vocab_size - 1 :] = 40.0
    logits[:, vocab_size:] = torch.nan
    commits = both.step(logits.to(dtype), place)
    assert (commits >= 0).sum(dim=1).min() > 0
    assert set((commits >= 0).nonzero()[:, 1].tolist()) <= set(masked)


def test_equals_go_to_the_lower_id_and_the_leftmost_position() -> None:
    rules = ("threshold", "quota", "margin", "maskgit_plus", "entropy")
    both = Both([request(4, unmasking=rule, steps_per_block=2) for rule in rules], 4, 40, mask_token_id=0, tile=16)
    logits = torch.zeros(22, 40, device=DEVICE)
    logits[:, [0, 20, 17, 39]] = 2.0
    commits = both.step(logits, both.candidates()).tolist()
    assert commits == [[17, -1, -1, -1]] + [[17, 17, -1, -1]] * 4


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_fail_their_own_request_alone(broken: float) -> None:
    """One value in a tile, and a tile or a row full of it; a mask token of NaN is no matter."""
    options: list[dict[str, object]] = [
        {"unmasking": "threshold"}, {"unmasking": "random"}, {"unmasking": "entropy"},
        {"unmasking": "quota", "temperature": 0.7}, {"unmasking": "quota", "quota_schedule": "timesteps"}, {},
    ]  # fmt: skip
    both = Both([request(2, **one) for one in options], 2, 40, mask_token_id=5, tile=16)
    logits = random_logits(1, 14, 40)
    logits[:, 5] = torch.nan
    logits[[1, 5, 7], 20] = broken
    logits[3, 16:32] = broken
    logits[8] = broken
    commits = both.step(logits, both.candidates())
    failed = [0, 1, 2, 3, 4] if broken != -torch.inf else [4]
    assert (commits == FAILED).any(dim=1).tolist() == [row in failed for row in range(6)]
    assert not both.seats.is_masked[[1 + row for row in failed]].any()
    again = both.step(random_logits(2, 14, 40), torch.arange(14, dtype=torch.int32, device=DEVICE))
    assert (again[failed] == NOTHING).all()


def test_scores_keep_the_digits_of_sure_positions() -> None:
    """From even to sure beyond float32's 1, drawn and not."""
    rules = ("threshold", "entropy", "margin", "maskgit_plus", "random")
    requests = [request(3, unmasking=rule, temperature=heat) for rule in rules for heat in (0.0, 0.6)]
    both = Both(requests, 3, 60, mask_token_id=5, tile=32)
    place = both.candidates()
    logits = random_logits(3, len(place), 60, scale=1.0)
    logits[:, 40] = torch.tensor([1.0, 10.0, 25.0], device=DEVICE).repeat(11)[: len(place)]
    masked = logits.index_fill(1, torch.tensor([5], device=DEVICE), -torch.inf)
    seat = both.seat_of.long()[place[:-2].long() // 3]
    score, token = dense_unmask._judge(masked[:-2], seat, place[:-2].long() % 3, both.seats)
    both.kernels.unmask(logits, place, both.seat_of, both.seats, both.commits)
    torch.testing.assert_close(both.kernels.score[place[:-2].long()], score, rtol=2e-5, atol=1e-12)
    assert both.kernels.token[place[:-2].long()].tolist() == token.tolist()


def test_nothing_impossible_is_drawn() -> None:
    """Three possible tokens, each in a tile of its own: all are drawn, about as often."""
    options = {"unmasking": "threshold", "confidence_threshold": 0.0, "temperature": 2.0}
    both = Both([request(4, seed=seed, **options) for seed in range(4)], 4, 48, mask_token_id=16, tile=16)
    logits = torch.full((18, 48), -torch.inf, device=DEVICE)
    logits[:, [2, 16, 17, 47]] = 1.0
    drawn = both.step(logits, both.candidates()).flatten().tolist()
    assert {token: drawn.count(token) > 2 for token in drawn} == {2: True, 17: True, 47: True}


def test_compaction_of_more_places_than_one_sweep() -> None:
    rng = random.Random(0)
    lengths = [(32, [o for o in range(32) if rng.random() < 0.7]) for _ in range(80)]
    requests = [request(length, done) for length, done in lengths] + [request(32), request(3)]
    both = Both(requests, 32, 40, mask_token_id=5, tile=64, logits_shift=1)
    expected = dense_unmask.compact(dense_unmask.candidates(both.seats, both.seat_of.long()), 1000)
    for num_rows in (1000, 500, 1):
        place = torch.full((num_rows,), 77, dtype=torch.int32, device=DEVICE)
        both.kernels.compact(place, both.seat_of, both.seats)
        assert place.tolist() == expected[:num_rows].tolist()
    assert expected[900] == -1


def test_a_batch_is_padded_with_a_seat_that_nobody_has_and_rows_of_whole_blocks_may_be_given() -> None:
    """Through the public class, which chooses Triton by itself here."""
    requests = [request(3, unmasking="quota", seed=4, temperature=1.0), request(2, (1,))]
    answers = []
    for use_triton in (None, False):
        seats = Seats(3, 3, DEVICE, mask_token_id=5, logits_shift=0)
        seats.take([2, 1], requests)
        fused = FusedUnmasker(12, 4, 3, DEVICE, vocab_size=40, mask_token_id=5, use_triton=use_triton)
        seat_of = torch.tensor([0, 1, 2, 0], dtype=torch.int32, device=DEVICE)
        answers.append(fused.run(random_logits(0, 12, 40), fused.all_places(4), seat_of, seats).tolist())
        answers[-1].append(fused.compact(seat_of, seats, 4).tolist())
    assert answers[0] == answers[1]
    assert [place >= 0 for place in answers[0][-1]] == [True, True, False, False]


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter would take minutes")
@pytest.mark.parametrize("vocab_size", [126_464, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_vocabularies(vocab_size: int, dtype: torch.dtype) -> None:
    rng = random.Random(0)
    both = Both([any_request(rng, 32, vocab_size) for _ in range(16)], 32, vocab_size, vocab_size - 7, tile=TILE)
    for step in range(64):
        place = both.candidates()
        generator = torch.Generator(DEVICE).manual_seed(step)
        both.step((torch.randn(len(place), vocab_size, generator=generator, device=DEVICE) * 4).to(dtype), place)
    assert not both.seats.is_masked.any()


@pytest.mark.skipif(IS_INTERPRETED, reason="needs a CUDA device")
def test_the_host_waits_for_nothing() -> None:
    """The torch version, and taking seats; a captured graph shows it of the kernels."""
    both = Both([any_request(random.Random(i), 32, 1000) for i in range(8)], 32, 1000, 999, tile=TILE)
    logits, place = random_logits(0, 288, 1000), torch.arange(288, device=DEVICE)
    others = [any_request(random.Random(i), 32, 1000) for i in range(8)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        both.torch_seats.take(range(1, 9), others)
        dense_unmask.unmask(logits, place, both.seat_of.long(), both.torch_seats, 999)
        both.torch_seats.leave([3])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not both.torch_seats.is_masked[3].any()


@pytest.mark.skipif(IS_INTERPRETED, reason="needs a CUDA device")
def test_captured_in_a_graph() -> None:
    requests = [any_request(random.Random(0), 32, 1000) for _ in range(8)]
    both = Both(requests, 32, 1000, 999, tile=TILE)
    fused = FusedUnmasker(288, 9, 32, DEVICE, vocab_size=1000, mask_token_id=999)
    logits = random_logits(0, 288, 1000)

    def step() -> Tensor:
        place = fused.compact(both.seat_of, both.seats, 288)
        return fused.run(logits.index_select(0, place.clamp(min=0)), place, both.seat_of, both.seats)

    both.seats.leave(range(9))
    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        commits = step()
    both.seats.take(range(1, 9), requests)
    for _ in range(32):
        place = dense_unmask.compact(dense_unmask.candidates(both.torch_seats, both.seat_of.long()), 288)
        rows = logits[place.clamp(min=0)]
        expected = dense_unmask.unmask(rows, place, both.seat_of.long(), both.torch_seats, 999)
        graph.replay()
        assert commits.tolist() == expected.tolist()
