"""What is simulated: a model on a cluster of GPUs, each with a worker."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from backend.core.auto_threshold import AutoHybridPolicy
from backend.core.routing import ConditionalPolicy, HybridPolicy, Policy
from benchmarks.simulator import hardware
from benchmarks.simulator.denoising import Lognormal, StepsPerBlock
from benchmarks.simulator.hardware import GPU, Model
from benchmarks.simulator.latency import Efficiencies, Latency, Roofline


@dataclass(frozen=True)
class SimulatorConfig:
    """One configuration of the live system, and the machine that it runs on.

    Without prefill workers it is the colocated graph, with an infinite threshold the disaggregated one.

    Attributes:
        model, gpu: names in the data files.
        token_budget: tau of Algorithm 1, or "auto".
        overflow_threshold: theta of Algorithm 2, or "auto".
        routing: "hybrid", or "conditional" (Dynamo's conditional disaggregation, a baseline).
        kv_cache_tokens: of each worker; None: what the GPU's memory holds.
        max_prefill_tokens: of a prefill worker's step.
        cache_policy, cache_refresh_interval: of every request, see `SamplingParams`.
        steps: how many forwards a block takes.
        rates: of the roofline.
        has_all_logits: see `Roofline`.
        latency: step times in place of the roofline's, such as `Measured`.
        hop_s: a message between two processes, one way.
        hand_over_s: by which a prefill worker's step is longer for every prefill.
        transfer_s: of a KV transfer of no tokens.
        link_efficiency: part of the link's peak that a KV transfer reaches.
    """

    model: str = "llada-8b"
    gpu: str = "h100"
    num_prefill: int = 0
    num_colocated: int = 8
    token_budget: int | Literal["auto"] = 1024
    overflow_threshold: float | Literal["auto"] = 8192
    routing: str = "hybrid"
    max_local_prefill_length: int = 512
    max_prefill_queue_size: int = 16
    page_size: int = 16
    kv_cache_tokens: int | None = None
    max_num_seqs: int = 64
    max_prefill_tokens: int = 4096
    cache_policy: str = "dual"
    cache_refresh_interval: int | None = None
    steps: StepsPerBlock = Lognormal(16.0)
    rates: Efficiencies = Efficiencies()
    has_all_logits: bool = False
    latency: Latency | None = None
    hop_s: float = 1e-3
    hand_over_s: float = 0.0
    transfer_s: float = 8e-3
    link_efficiency: float = 4 / 9

    def __post_init__(self) -> None:
        if self.num_colocated < 1 or self.num_prefill < 0:
            raise ValueError(
                f"{self.num_prefill} prefill and {self.num_colocated} colocated workers: 1 colocated or more"
            )
        if self.routing not in ("hybrid", "conditional"):
            raise ValueError(f"routing={self.routing!r} is not known; allowed: hybrid, conditional")
        for field, known in (("model", hardware.models()), ("gpu", hardware.gpus())):
            if (name := getattr(self, field)) not in known:
                raise ValueError(f"{field}={name!r} is not known; allowed: {', '.join(known)}")

    @property
    def name(self) -> str:
        """Such as 8C, 5P3D or 5P3C, with the thresholds that matter."""
        budget = f"τ {self.token_budget}"
        if not self.num_prefill:
            return f"{self.num_colocated}C {budget}"
        if self.routing == "conditional":
            return f"{self.num_prefill}P{self.num_colocated}C conditional {budget}"
        if self.overflow_threshold == math.inf:
            return f"{self.num_prefill}P{self.num_colocated}D"
        theta = self.overflow_threshold if self.overflow_threshold == "auto" else f"{self.overflow_threshold:g}"
        return f"{self.num_prefill}P{self.num_colocated}C θ {theta} {budget}"

    @property
    def shape(self) -> Model:
        return hardware.models()[self.model]

    @property
    def device(self) -> GPU:
        return hardware.gpus()[self.gpu]

    @property
    def num_pages(self) -> int:
        tokens = self.kv_cache_tokens or hardware.kv_cache_tokens(self.shape, self.device, self.page_size)
        return -(-tokens // self.page_size)

    def policy(self) -> Policy:
        if self.routing == "conditional":
            return ConditionalPolicy(self.max_local_prefill_length, self.max_prefill_queue_size)
        if self.overflow_threshold == "auto":
            return AutoHybridPolicy()
        return HybridPolicy(self.overflow_threshold)

    def step_latency(self, block_length: int) -> Latency:
        return self.latency or Roofline(
            self.shape, self.device, self.rates, block_length, has_all_logits=self.has_all_logits
        )

    def transfer_latency_s(self, num_tokens: int) -> float:
        """Seconds to read that many tokens' KV, whole pages."""
        num_bytes = -(-num_tokens // self.page_size) * self.page_size * self.shape.kv_bytes_per_token
        return self.transfer_s + num_bytes / (self.link_efficiency * self.device.link_gb_per_s * 1e9)


def calibrated(model: str, trace: str, **changes: Any) -> SimulatorConfig:
    """The paper's testbed (8 H100s) with the constants of the data file `calibration.yaml`.

    On another GPU the KV pool is what its memory holds, the constants are the H100's.

    Raises:
        ValueError: there are none for this model and trace, or see `SimulatorConfig`.
    """
    of_model = hardware.read("calibration.yaml").get(model)
    if of_model is None or trace not in of_model["steps_per_block"]:
        raise ValueError(f"no calibration of {model} on {trace}; see {hardware.DATA / 'calibration.yaml'}")
    constants = of_model["h100"]
    if changes.get("gpu", "h100") != "h100":
        changes.setdefault("kv_cache_tokens", None)
    config = SimulatorConfig(
        model=model,
        steps=Lognormal(of_model["steps_per_block"][trace]),
        rates=Efficiencies(overall=constants["efficiency"]),
        hand_over_s=constants["hand_over_s"],
        **of_model["prototype"],
    )
    return dataclasses.replace(config, **changes)
