"""The ways to serve that a sweep compares, as arguments of `sangam serve`."""

from __future__ import annotations

from dataclasses import dataclass

UNLIMITED_TOKENS = 1_000_000
"""A budget no step reaches: every prefill is admitted at once, whatever that does to decodes."""


@dataclass(frozen=True)
class Pools:
    """How many workers, and their thresholds in tokens.

    Attributes:
        overflow_threshold: theta of Algorithm 2, of the hybrid graph.
        token_budget: tau of Algorithm 1, of every colocated worker that has a budget.
        max_prefill_tokens: of one step of a prefill worker.
        max_local_prefill_length: conditional: shorter prompts are prefilled where they are denoised.
    """

    num_prefill: int = 1
    num_colocated: int = 2
    overflow_threshold: int = 2048
    token_budget: int = 256
    max_prefill_tokens: int = 1024
    max_local_prefill_length: int = 128

    @property
    def num_workers(self) -> int:
        """The same for every variant."""
        return self.num_prefill + self.num_colocated


@dataclass(frozen=True)
class Variant:
    """One way to serve.

    Attributes:
        arguments: of `sangam serve`.
        about: what it is, in a line.
    """

    name: str
    arguments: tuple[str, ...]
    about: str


def variants(pools: Pools) -> dict[str, Variant]:
    """All that can be compared, by name. Each has `pools.num_workers` workers."""
    budget = f"--token-budget={pools.token_budget}"
    no_budget = f"--token-budget={UNLIMITED_TOKENS}"
    theta = f"--overflow-threshold={pools.overflow_threshold}"
    split = (
        f"--prefill={pools.num_prefill}",
        f"--colocated={pools.num_colocated}",
        f"--max-prefill-tokens={pools.max_prefill_tokens}",
    )
    conditional = ("--routing=conditional", f"--max-local-prefill-length={pools.max_local_prefill_length}")
    pool = f"{pools.num_prefill}P{pools.num_colocated}"
    tau = f"τ {pools.token_budget}"
    found = (
        Variant("colocated", ("colocated", f"--workers={pools.num_workers}", budget), f"{pools.num_workers}C, {tau}"),
        Variant("disaggregated", ("disaggregated", *split), f"{pool}D, θ infinite"),
        Variant("hybrid", ("hybrid", *split, theta, budget), f"{pool}C, θ {pools.overflow_threshold}, {tau}"),
        Variant(
            "conditional",
            ("hybrid", *split, *conditional, no_budget),
            f"{pool}C, Dynamo's conditional disaggregation (prompts up to {pools.max_local_prefill_length} tokens are "
            "prefilled where they are denoised), no budget: the naive baseline",
        ),
        Variant(
            "prefill-prioritizing",
            ("hybrid", *split, theta, no_budget),
            f"{pool}C, θ {pools.overflow_threshold}, no budget",
        ),
    )
    return {variant.name: variant for variant in found}
