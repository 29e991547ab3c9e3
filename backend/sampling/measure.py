"""How sure the model is of a position, by its whole distribution there (Dream's `alg`)."""

from __future__ import annotations

import torch
from torch import Tensor


def negative_entropy(probabilities: Tensor) -> Tensor:
    """Minus the entropy [N], in nats, of `probabilities` [N, V]; 0 is certainty."""
    return -torch.special.entr(probabilities).sum(dim=-1)


def margin(probabilities: Tensor) -> Tensor:
    """By how much the most likely token leads the next one, [N], of `probabilities` [N, V]."""
    best = probabilities.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


MEASURES = {"entropy": negative_entropy, "margin": margin}
"""By the name of the request option `unmasking`."""
