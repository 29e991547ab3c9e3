"""What a denoising step costs beside the model: `python -m benchmarks.micro.step`.

A 2-layer, 64-wide LLaDA with random weights at sequence length 1819, 32-token blocks, one CPU thread.
Per batch size:

- outside: CPU time of `Engine.step()` (schedule, pack, sample, commit) less that of the model's
  forward, when the same requests run again (`same`) and when the batch is packed anew (`new`), as
  after every arrival and block boundary. Limits: 0.3 / 0.4 / 0.8 ms at batch 1 / 8 / 32.
- ahead: the same when steps are launched ahead, as on a GPU; what the CUDA graph replays there is taken off
  as the forward is: sampling too.
- step/bare: wall time of the step over the bare forward of the same tensors. Limit: 1.10 at batch 8.
- step/dense: the same over a forward with all sequences in one dense attention call, the least
  any layout can cost where all lengths are equal.

Ratios are taken within one run, medians of alternating samples.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from backend.attention.kv_cache import KVCache
from backend.attention.sdpa import SdpaAttention
from backend.core.page_pool import PagePool
from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.core.scheduler import Scheduler, SchedulerConfig
from backend.engine.device_runner import DeviceRunner
from backend.engine.engine import Engine
from backend.engine.model_runner import ModelRunner
from backend.models.config import ModelConfig
from backend.models.layers import Transformer
from backend.models.llada import Llada

Result = TypeVar("Result")
SEQUENCE, CANVAS, BLOCK = 1819, 128, 32
LIMITS_MS = {1: 0.3, 8: 0.4, 32: 0.8}
CONFIG = ModelConfig(
    architecture="llada", vocab_size=256, embedding_size=256, hidden_size=64, intermediate_size=160, num_layers=2,
    num_heads=4, num_kv_heads=4, max_position=4096, rms_norm_eps=1e-5, rope_theta=500000.0, mask_token_id=250,
    eos_token_ids=(251,),
)  # fmt: skip


class TimedModel(Llada):
    """Adds up the CPU time spent in the model itself."""

    spent = 0.0

    def forward(self, *args: object) -> Tensor:
        started = time.thread_time()
        out = super().forward(*args)  # type: ignore[arg-type]
        self.spent += time.thread_time() - started
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        started = time.thread_time()
        out = super().logits(hidden)
        self.spent += time.thread_time() - started
        return out

    def timed(self, run: Callable[[], Result]) -> Callable[[], Result]:
        """`run`, its time, whatever it calls, counted as the model's."""

        def timed() -> Result:
            started, before = time.thread_time(), self.spent
            out = run()
            self.spent = before + time.thread_time() - started
            return out

        return timed


def ahead_engine(batch: int) -> Engine:
    """As `denoising_engine`, launched ahead; all that a CUDA graph would hold counts as the model's time."""
    engine = denoising_engine(batch)
    runner, model = engine.runner, engine.runner.model
    assert isinstance(model, TimedModel) and isinstance(engine.scheduler, Scheduler)
    runner.on_device = DeviceRunner(model, runner.cache, runner.attention, batch, (batch,), SEQUENCE)
    graphs = runner.on_device.graphs
    assert graphs is not None
    graphs.wrap(model.timed)
    return Engine(runner, engine.scheduler, runs_ahead=True)


class DenseAttention:
    """Every sequence in one call, its KV contiguous: the floor."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], first: int) -> None:
        self.keys, self.values, self.first = keys, values, first

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]  # [B, S, K, E]
        rows = slice(self.first, self.first + BLOCK)
        keys[:, rows] = key.view(keys.shape[0], BLOCK, *key.shape[1:])
        values[:, rows] = value.view(keys.shape[0], BLOCK, *key.shape[1:])
        q = query.view(keys.shape[0], BLOCK, *query.shape[1:]).transpose(1, 2)
        out = scaled_dot_product_attention(q, keys.transpose(1, 2), values.transpose(1, 2))
        return out.transpose(1, 2).reshape(query.shape)


def denoising_engine(batch: int) -> Engine:
    """An engine with `batch` requests prefilled and 31 more steps to go in their block."""
    torch.manual_seed(0)
    model = TimedModel(CONFIG).eval().requires_grad_(False)
    pool = PagePool(batch * -(-SEQUENCE // 16), 16)
    cache = KVCache(CONFIG.num_layers, pool.num_pages, 16, 4, CONFIG.head_dim, torch.float32, torch.device("cpu"))
    engine = Engine(ModelRunner(model, cache), Scheduler(SchedulerConfig(10**9, batch), pool))
    params = SamplingParams(max_tokens=CANVAS, canvas_length=CANVAS, unmasking="quota", steps_per_block=BLOCK)
    for i in range(batch):
        prompt = [(i * 7 + j) % 250 for j in range(SEQUENCE - CANVAS)]
        engine.scheduler.add(Request(str(i), prompt, params, float(i)))
    engine.step()
    return engine


def outside_ms(engine: Engine, is_new: bool, steps: int) -> list[float]:
    model = engine.runner.model
    assert isinstance(model, TimedModel)
    samples = []
    for _ in range(steps):
        if is_new:
            engine.runner.forget_batch()
        before, model.spent = time.thread_time(), 0.0
        engine.step()
        samples.append((time.thread_time() - before - model.spent) * 1e3)
    return samples


@torch.inference_mode()
def dense_forward(model: Transformer, batch: int) -> Callable[[], object]:
    shape = (batch, SEQUENCE, CONFIG.num_kv_heads, CONFIG.head_dim)
    keys, values = ([torch.randn(shape) for _ in range(CONFIG.num_layers)] for _ in range(2))
    first = SEQUENCE - CANVAS
    ids = torch.randint(0, 250, (batch * BLOCK,))
    positions = torch.arange(first, first + BLOCK).repeat(batch)
    attention = DenseAttention(keys, values, first)
    return lambda: model.logits(model(ids, positions, attention))


def bare_forward(engine: Engine) -> Callable[[], object]:
    """The very tensors of the engine's last step, logits where positions are still masked."""
    runner = engine.runner
    packed = runner.last_batch
    assert packed is not None
    attention = SdpaAttention(runner.cache, packed.slots, packed.spans)
    rows = torch.from_numpy(packed.choice.logit_rows())
    return lambda: runner.model.logits(runner.model(packed.token_ids, packed.positions, attention)[rows])


def interleaved_ms(functions: Sequence[Callable[[], object]], samples: int) -> list[list[float]]:
    """Wall time of each call, the functions taking turns so that noise hits all alike."""
    times: list[list[float]] = [[] for _ in functions]
    with torch.inference_mode():
        for _ in range(samples):
            for function, taken in zip(functions, times, strict=True):
                started = time.perf_counter()
                function()
                taken.append((time.perf_counter() - started) * 1e3)
    return times


def measure(batch: int) -> tuple[float, float, float, float, float]:
    """(outside same, outside new, outside ahead, step / bare, step / dense) at one batch size."""
    same, new, ahead, to_bare, to_dense = [], [], [], [], []
    for _ in range(3):
        engine = denoising_engine(batch)
        outside_ms(engine, True, 2)
        same += outside_ms(engine, False, 8)
        new += outside_ms(engine, True, 8)
        launched_ahead = ahead_engine(batch)
        outside_ms(launched_ahead, False, 3)
        ahead += outside_ms(launched_ahead, False, 16)
        model = engine.runner.model
        functions = (engine.step, bare_forward(engine), dense_forward(model, batch))
        step, bare, dense = (statistics.median(taken) for taken in interleaved_ms(functions, 9))
        to_bare.append(step / bare)
        to_dense.append(step / dense)
    return tuple(statistics.median(figures) for figures in (same, new, ahead, to_bare, to_dense))  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=list(LIMITS_MS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    outside = f"{'outside ms: same':>17} {'new':>6} {'ahead':>6} {'limit':>6}"
    print(f"{'batch':>5} {outside} {'step/bare':>10} {'step/dense':>11}")
    for batch in args.batch:
        same, new, ahead, to_bare, to_dense = measure(batch)
        limit = LIMITS_MS.get(batch)
        print(
            f"{batch:>5} {same:>17.3f} {new:>6.3f} {ahead:>6.3f} {limit or '':>6} {to_bare:>10.2f} {to_dense:>11.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
