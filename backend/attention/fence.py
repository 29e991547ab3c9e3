"""Knowing when a device is done with something."""

from __future__ import annotations

import torch


class Fence:
    """A place in the order of a device's current stream. A CPU does everything at once: always passed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self) -> None:
        """Here, after all that is on the stream already."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Until it is passed; at once if it was never set."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def is_passed(self) -> bool:
        return self._event is None or bool(self._event.query())
