"""A transfer as the source of KV: what its pages hold, and which sequences wait to be pulled."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

import torch

from backend.attention.fence import Fence
from backend.transfer.mailbox import Mailbox
from backend.transfer.stamps import PageStamps

log = logging.getLogger(__name__)


class Offering:
    """The half of a `KVTransfer` that does not depend on who moves the pages.

    Args:
        device: where they are.
    """

    def __init__(self, num_pages: int, device: torch.device, on_pulled: Callable[[str], None]) -> None:
        self.stamps = PageStamps(num_pages)
        self._device = device
        self._layers_under_way: deque[tuple[Fence, Callable[[], None]]] = deque()
        self._on_pulled = on_pulled
        self._mailbox = Mailbox()
        self._expected: set[str] = set()

    def stamp(self, pages: Sequence[int]) -> int:
        return self.stamps.stamp(pages)

    def invalidate(self, pages: Sequence[int]) -> None:
        self.stamps.invalidate(pages)

    def begin(self, pages: Sequence[int]) -> None:
        self.stamps.set_progress(pages, 0)

    def set_progress(self, pages: Sequence[int], num_layers: int) -> None:
        if self._device.type == "cpu":
            self.stamps.set_progress(pages, num_layers)
            return
        written, stamp = self._fence(), self.stamp(pages)
        publish = lambda: self.stamps.set_progress(pages, num_layers, stamp)  # noqa: E731
        self._mailbox.put(lambda: self._layers_under_way.append((written, publish)))

    def _fence(self) -> Fence:
        """Passed when the device has done all that it has been told to on this thread's current stream."""
        fence = Fence(self._device)
        fence.set()
        return fence

    def _publish_layers(self) -> bool:
        """Tells peers of the layers that the device has written by now; in the transfer's thread. False: of none."""
        is_any = False
        while self._layers_under_way and self._layers_under_way[0][0].is_passed:
            self._layers_under_way.popleft()[1]()
            is_any = True
        return is_any

    def expect(self, key: str) -> None:
        self._mailbox.put(lambda: self._expected.add(key))

    def forget(self, key: str) -> None:
        self._mailbox.put(lambda: self._expected.discard(key))

    def _pulled(self, key: str) -> None:
        """A peer says so; in the transfer's thread, which goes on whatever its user does with it."""
        if key in self._expected:
            self._expected.remove(key)
            try:
                self._on_pulled(key)
            except Exception:
                log.exception("nobody took notice that %s has been pulled", key)
