"""The optimizer of the weight matrices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum (Jordan et al., 2024) in float32, its steps scaled to AdamW's size.

    torch's own computes in bfloat16, which a CPU without bfloat16 units runs ten times slower.

    Args:
        fused_rows: matrices of as many rows in all are fused projections, each orthogonalized on its own.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, fused_rows: Sequence[int]) -> None:
        super().__init__(params, {"lr": lr})
        self._fused_rows = list(fused_rows)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for parameter in group["params"]:
            gradient = parameter.grad
            buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            buffer.lerp_(gradient, 0.05)
            update = gradient.lerp(buffer, 0.95)
            is_fused = len(update) == sum(self._fused_rows)
            parts = update.split(self._fused_rows) if is_fused else (update,)
            steps = [0.2 * max(part.shape) ** 0.5 * _orthogonalized(part) for part in parts]
            parameter.mul_(1 - group["lr"] * 0.01)
            parameter.add_(torch.cat(steps), alpha=-group["lr"])


def _orthogonalized(x: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix of `x` [R, C], by five Newton-Schulz iterations."""
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x
