"""Figure 3: a denoising step against the batch, beside one of a left-to-right model of the same size."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.simulator import hardware
from benchmarks.simulator.hardware import Model
from benchmarks.simulator.latency import Efficiencies, Latency, Roofline

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 1024


@dataclass(frozen=True)
class Decoder:
    """Attributes:
    block_length: query tokens per step of a request.
    beside: the left-to-right model that the paper draws in the same panel.
    """

    label: str
    shape: Model
    block_length: int
    beside: str = ""


# The left-to-right shapes are of the published checkpoints' config.json.
DECODERS = (
    Decoder("LLaDA-8B", hardware.models()["llada-8b"], 32, "Llama-3-8B"),
    Decoder("Dream-7B", hardware.models()["dream-7b"], 32, "Qwen2.5-7B"),
    Decoder("Llama-3-8B", Model(32, 4096, 32, 8, 128, 14336, 128256), 1),
    Decoder("Qwen2.5-7B", Model(28, 3584, 28, 4, 128, 18944, 152064), 1),
)


def step_ms(decoder: Decoder) -> list[float]:
    """Milliseconds per batch of `BATCHES`, all requests at `CONTEXT` tokens, on an H100 at uncalibrated rates."""
    # SGLang, on which the paper measured the left-to-right models, prepares a step's requests while another runs.
    rates = Efficiencies() if decoder.block_length > 1 else Efficiencies(request_s=0.0)
    latency: Latency = Roofline(decoder.shape, hardware.gpus()["h100"], rates, decoder.block_length)
    return [1e3 * latency.step_s([], batch, batch * CONTEXT) for batch in BATCHES]


def growth(label: str) -> float:
    """A step at the largest batch over one at batch 1."""
    times = step_ms(next(decoder for decoder in DECODERS if decoder.label == label))
    return times[-1] / times[0]


def half_throughput_batch(label: str) -> int:
    """The smallest batch with half the tokens per second of the largest."""
    times = step_ms(next(decoder for decoder in DECODERS if decoder.label == label))
    rates = [batch / seconds for batch, seconds in zip(BATCHES, times, strict=True)]
    return next(batch for batch, rate in zip(BATCHES, rates, strict=True) if rate >= rates[-1] / 2)
