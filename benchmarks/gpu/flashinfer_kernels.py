"""Compiles, or where they are already only loads, the FlashInfer kernels that a model's forward runs.

    python -m benchmarks.gpu.flashinfer_kernels

FlashInfer compiles a kernel when it is first called; this does it beforehand, one after the other, and
needs nvcc but no GPU (set FLASHINFER_CUDA_ARCH_LIST=9.0a, say).
"""

from __future__ import annotations

import argparse
import time

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128])
    arguments = parser.parse_args()

    from flashinfer import activation, norm, prefill, rope

    from backend.attention.flashinfer import KERNEL

    loads = {
        "norm": norm.get_norm_module,
        "rope": rope.get_rope_module,
        "silu": lambda: activation.get_act_and_mul_module("silu"),
    }
    for name in arguments.dtype:
        for size in arguments.head_dim:
            dtype = getattr(torch, name)
            # What `plan` asks for: no position encoding, window, cap on logits or half-precision products.
            shape = (dtype, dtype, dtype, torch.int32, size, size, 0, False, False, False)
            loads[f"attention {name} {size}"] = lambda shape=shape: prefill.get_batch_prefill_module(KERNEL, *shape)
    for name, load in loads.items():
        started = time.monotonic()
        load()
        print(f"{name:<24} {time.monotonic() - started:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
