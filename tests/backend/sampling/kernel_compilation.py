"""Compiles the kernels for an H100 or H200 as they would be launched there; needs no GPU.

`python -m tests.backend.sampling.kernel_compilation` prints each one's registers, spilled bytes and widest load.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from backend.sampling import triton_rows, triton_unmask
from backend.sampling.fused import FusedUnmasker
from backend.sampling.seats import Seats

TYPES = {torch.int64: "i64", torch.int32: "i32", torch.float32: "fp32", torch.float64: "fp64", torch.bool: "i1"}
TYPES |= {torch.bfloat16: "bf16", torch.float16: "fp16"}
KERNELS = [triton_rows.scan_tile, triton_rows.judge_row, triton_unmask._choose, triton_unmask._compact]
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def launches(longest_block: int, dtype: torch.dtype) -> list[Launch]:
    """What a step of 2 requests of LLaDA launches: (kernel, arguments, options)."""
    recorded: list[Launch] = []
    for kernel in KERNELS:

        def run(*args: object, grid: object, warmup: bool, kernel: object = kernel, **options: object) -> None:
            recorded.append((kernel, args, options))

        kernel.run = run
    cpu = torch.device("cpu")
    vocab_size, mask = 126_464, 126_336
    seats = Seats(2, longest_block, cpu, mask_token_id=mask, logits_shift=0)
    rows = 2 * longest_block
    fused = FusedUnmasker(rows, 2, longest_block, cpu, vocab_size=vocab_size, mask_token_id=mask, use_triton=True)
    seat_of = torch.arange(2, dtype=torch.int32)
    fused.run(torch.empty(rows, vocab_size, dtype=dtype), fused.compact(seat_of, seats, rows), seat_of, seats)
    return recorded


def compiled(launch: Launch) -> tuple[str, int, int, str]:
    """Kernel, registers, bytes spilled, widest load from memory."""
    kernel, args, options = launch
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = f"*{TYPES[value.dtype]}" if isinstance(value, Tensor) else "i32"
        if (value.data_ptr() if isinstance(value, Tensor) else value) % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [ptxas, "-v", "--gpu-name=sm_90a", "-o", path.with_suffix(".cubin"), path]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.findall(r"Used (\d+) registers", said)[0])
    spilled = int(re.findall(r"(\d+) bytes spill stores", said)[0])
    return kernel.fn.__name__, registers, spilled, max(re.findall(r"ld\.global\S*?((?:v\d\.)?b\d+)", ptx), key=_width)


def _width(load: str) -> int:
    lanes, bits = re.findall(r"(?:v(\d)\.)?b(\d+)", load)[0]
    return int(lanes or 1) * int(bits)


if __name__ == "__main__":
    for longest_block in (32, 256):
        for launch in launches(longest_block, torch.bfloat16):
            print(longest_block, *compiled(launch))
