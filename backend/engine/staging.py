"""Copies between host and device that nobody waits for.

Page-locked memory comes from torch's caching allocator, which uses a piece again only after the copies
from and to it have ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """int64 arrays of one dimension as tensors on `device`, in one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [len(array) for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    np.concatenate(arrays, out=host.numpy())
    return list(host.to(device, non_blocking=True).split(sizes))


class Download:
    """A tensor's way to the host: begun now, to be waited for later. The tensor may change meanwhile."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cpu":
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def array(self) -> NDArray[np.int32]:
        """What the tensor held when this was made; waits until it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
