"""Where a curve of latency against load turns up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

Curve = Sequence[tuple[float, float]]
"""(load, latency), loads ascending."""

FACTOR = 2.0


def load_at(curve: Curve, latency: float) -> float:
    """The load at which the curve first rises to `latency`, its logarithm taken as linear between two loads.

    That is how far apart two curves are where latency says little: near saturation 3% more load double it.

    Returns:
        -inf if the curve begins above, inf if it ends below.
    """
    if curve[0][1] > latency:
        return -math.inf
    for (load, low), (next_load, high) in pairwise(curve):
        if low <= latency <= high:
            part = math.log(latency / low) / math.log(high / low) if high > low else 0.0
            return load + part * (next_load - load)
    return math.inf


def knee(curve: Curve, factor: float = FACTOR) -> float:
    """The load at which latency is `factor` times that of the lowest load; inf if it never is."""
    return load_at(curve, factor * curve[0][1])
