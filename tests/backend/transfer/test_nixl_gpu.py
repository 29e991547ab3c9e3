"""Two processes that share a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from backend.transfer.nixl import NixlTransfer
from tests.backend.transfer.workers import NUM_LAYERS, Puller, RemoteOwner, content, wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SOURCE_PAGES = (90, 3, 4, 5, 41, 12)
PAGES = (0, 63, 17, 18, 19, 5)
CYCLES = 100_000_000  # some 0.05 s


@pytest.fixture(scope="module")
def owner() -> Iterator[RemoteOwner]:
    owner = RemoteOwner("owner", device="cuda")
    yield owner
    owner.kill()


@pytest.fixture
def puller() -> Iterator[Puller]:
    puller = Puller(lambda cache, model, on_pulled: NixlTransfer(cache, "puller", model, on_pulled), device="cuda")
    yield puller
    puller.transfer.close()


def expected(seed: int) -> dict[int, torch.Tensor]:
    return dict(zip(PAGES, content(seed, len(PAGES)), strict=True))


def test_pages_move_from_one_process_to_the_other(owner: RemoteOwner, puller: Puller) -> None:
    assert owner.source().device == "cuda"
    for seed in (1, 2):
        stamp = owner.prefill(f"whole {seed}", SOURCE_PAGES, seed)
        pulled = puller.transfer.pull(
            owner.source(), SOURCE_PAGES, PAGES, stamp=stamp, key=f"whole {seed}", timeout_s=20.0
        )
        pulled.result()
        puller.check(expected(seed))
    wait_until(lambda: owner.pulled("whole 2") == 1)


def test_each_layer_is_read_when_the_gpu_has_written_it(owner: RemoteOwner, puller: Puller) -> None:
    stamp = owner.begin("layers", SOURCE_PAGES)
    pulled = puller.transfer.pull(
        owner.source(), SOURCE_PAGES, PAGES, stamp=stamp, key="layers", timeout_s=20.0, by_layer=True
    )
    started = time.monotonic()
    launched_s = owner.launch_layers(SOURCE_PAGES, 3, CYCLES)
    pulled.result()
    took_s = time.monotonic() - started
    puller.check(expected(3))
    assert took_s > 2 * launched_s and took_s > NUM_LAYERS * 0.02  # told at the launch, it would have been read then


def test_pages_are_not_written_while_a_kernel_may_still_write_to_them(owner: RemoteOwner, puller: Puller) -> None:
    stamp = owner.prefill("late", SOURCE_PAGES, 4)
    torch.cuda._sleep(10 * CYCLES)
    puller.cache.data.fill_(-1.0)  # of a step that is still to run
    pulled = puller.transfer.pull(owner.source(), SOURCE_PAGES, PAGES, stamp=stamp, key="late", timeout_s=20.0)
    pulled.result()
    for page, tensor in expected(4).items():
        assert torch.equal(puller.cache.data[:, :, page].cpu(), tensor)
