"""Triton decides when it is imported whether it compiles or interprets: each way has a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.timeout(400)  # the interpreter runs a kernel's programs one after the other
CASES = "tests/backend/sampling/triton_cases.py"


def python(*args: str, **environment: str) -> str:
    """What it printed, if all went well."""
    command = [sys.executable, "-m", *args]
    run = subprocess.run(
        command,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


def test_kernels_are_torch_s_by_the_interpreter() -> None:
    assert " passed" in python("pytest", "-q", CASES, TRITON_INTERPRET="1")


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """What the interpreter accepts the compiler may not; and logits are read 16 bytes at a time."""
    lines = python(
        "tests.backend.sampling.kernel_compilation", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)
    ).splitlines()
    kernels = {line.split()[1] for line in lines}
    assert kernels == {"scan_tile", "judge_row", "_choose", "_compact"} and len(lines) == 8
    for line in lines:
        _, kernel, registers, spilled, load = line.split()
        assert int(registers) <= 160 and int(spilled) <= 64, line
        assert load == "v4.b32" or kernel not in ("scan_tile", "judge_row"), line


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_are_torch_s_on_a_gpu() -> None:
    assert " passed" in python("pytest", "-q", CASES, TRITON_INTERPRET="0")
