"""How large a step may be for the memory that was set aside; a larger one runs as several forwards."""

from __future__ import annotations

from dataclasses import dataclass

from backend.core.queries import is_steady, num_query_tokens, num_steady_tokens
from backend.core.request import Request
from backend.core.step import StepPlan


@dataclass(frozen=True)
class StepLimits:
    """What one forward computes at most, a single request that is larger excepted.

    Clients decide how much a decode computes: `prefix` the rest of the canvas, `block_length` the rows of logits.

    Attributes:
        num_tokens: queries.
        num_positions: those that may be unmasked, each with a row of logits.
    """

    num_tokens: int
    num_positions: int

    def parts(self, plan: StepPlan, logits_shift: int) -> list[StepPlan]:
        """Plans of the same requests in the same order, each within the limits: the plan itself if it is."""
        requests = (*plan.prefills, *plan.decodes)
        num_prefilled = sum(request.sequence_length for request in plan.prefills)
        positions = [request.block.num_masked for request in requests]
        if num_prefilled + plan.decode_tokens <= self.num_tokens and sum(positions) <= self.num_positions:
            return [plan]
        parts: list[StepPlan] = []
        prefills: list[Request] = []
        decodes: list[Request] = []
        tokens = masked = decode_tokens = 0
        for i, (request, more_masked) in enumerate(zip(requests, positions, strict=True)):
            is_prefill = i < len(plan.prefills)
            more = request.sequence_length if is_prefill else _num_decode_tokens(request, logits_shift)
            is_full = tokens + more > self.num_tokens or masked + more_masked > self.num_positions
            if is_full and (prefills or decodes):
                parts.append(StepPlan(prefills, decodes, decode_tokens))
                prefills, decodes, tokens, masked, decode_tokens = [], [], 0, 0, 0
            (prefills if is_prefill else decodes).append(request)
            tokens += more
            masked += more_masked
            decode_tokens += 0 if is_prefill else more
        return [*parts, StepPlan(prefills, decodes, decode_tokens)]


def _num_decode_tokens(request: Request, logits_shift: int) -> int:
    # Of one that was launched ahead the prefill may still run: it looks as if that were yet to come.
    return num_steady_tokens(request) if is_steady(request) else num_query_tokens(request, logits_shift)
