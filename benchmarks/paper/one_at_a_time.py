"""Fast-dLLM as the paper runs it (its section 6.2): one GPU, one request after the other, in order of arrival.

Computed, not simulated: with nothing to batch a request's service time is the sum of its steps', and a queue with
one server needs no scheduler. Step times and forwards per block are the simulator's.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from benchmarks.paper.points import Pair, workload
from benchmarks.simulator.config import calibrated


@cache
def latencies_s(pair: Pair, load: float, num_requests: int, seed: int) -> npt.NDArray[np.float64]:
    """End-to-end, one per request."""
    config, asked = calibrated(pair.model, pair.trace), workload(pair, load, num_requests, seed)
    latency = config.step_latency(asked.block_length)
    free_s, latencies = 0.0, []
    for index, (length, due_s) in enumerate(zip(asked.lengths, asked.arrivals_s, strict=True)):
        tokens = length.num_prompt_tokens + asked.canvas_of(length)
        num_blocks = asked.num_tokens(length) // asked.block_length
        num_steps = sum(config.steps.draw(asked.seed, index, num_blocks, asked.block_length))
        prefill_s = latency.step_s([tokens], 0, 0) + 2 * config.hop_s  # to the worker, and its last word
        decode_s = latency.step_s([], 1, tokens)
        free_s = max(free_s, due_s) + num_blocks * prefill_s + (num_steps - num_blocks) * decode_s
        latencies.append(free_s - due_s)
    return np.array(latencies)
