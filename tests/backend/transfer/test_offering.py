"""What a source on a GPU says of its layers, the GPU played by hand."""

from __future__ import annotations

import pytest
import torch

from backend.transfer import offering
from backend.transfer.offering import Offering

PAGES = (3, 1)


class Fence:
    """Passed when the test says so."""

    all: list[Fence] = []

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda"
        self.is_passed = self.is_set = False
        Fence.all.append(self)

    def set(self) -> None:
        self.is_set = True


class Source(Offering):
    def __init__(self) -> None:
        super().__init__(8, torch.device("cuda"), lambda key: None)

    def step(self) -> bool:
        """What the transfer's thread does."""
        self._mailbox.work(0.0)
        return self._publish_layers()

    @property
    def progress(self) -> int:
        return int(self.stamps.progress[PAGES[0]])


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    Fence.all.clear()
    monkeypatch.setattr(offering, "Fence", Fence)
    return Source()


def test_a_layer_is_told_when_the_gpu_has_written_it(source: Source) -> None:
    source.begin(PAGES)
    for layer in range(3):
        source.set_progress(PAGES, layer + 1)
    assert all(fence.is_set for fence in Fence.all)
    assert not source.step() and source.progress == 0
    Fence.all[0].is_passed = True
    assert source.step() and source.progress == 1
    Fence.all[1].is_passed = Fence.all[2].is_passed = True
    assert source.step() and source.progress == 3
    assert not source.step()


def test_of_released_pages_nothing_more_is_told(source: Source) -> None:
    source.begin(PAGES)
    source.set_progress(PAGES, 1)
    source.invalidate(PAGES)
    Fence.all[0].is_passed = True
    source.step()
    assert source.progress == source.stamps.RELEASED
    source.begin(PAGES)
    source.step()
    assert source.progress == 0
