"""What lies in the archive; pip and nvcc are played."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu import bring


def test_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []

    def pip(command: str, *arguments: str | Path) -> None:
        calls.append((command, *map(str, arguments)))
        target = Path(arguments[arguments.index("--target") + 1])
        if target.name == "here":
            for name in ("__init__.py", "jit/core.py", "data/csrc/batch_prefill.cu", "data/csrc/moe.cu"):
                path = target / "flashinfer" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(name)
        else:
            (target / "tvm_ffi").mkdir(parents=True)

    def compile_kernels(site: Path, build: Path, arch: str) -> list[Path]:
        assert arch == "10.0a"
        kernels = [build / name / f"{name}.so" for name in ("norm", "batch_prefill_bf16")]
        for kernel in kernels:
            kernel.parent.mkdir(parents=True)
            kernel.write_bytes(b"compiled")
        return kernels

    monkeypatch.setattr(bring, "_pip", pip)
    monkeypatch.setattr(bring, "_compile", compile_kernels)
    monkeypatch.setattr("sys.argv", ["bring", "--out", str(tmp_path), "--python", "3.11", "--arch", "10.0a"])
    bring.main()
    with tarfile.open(tmp_path / bring.ARCHIVE) as archive:
        files = {name for name in archive.getnames() if Path(name).suffix}
    assert files == {
        "./flashinfer/__init__.py",
        "./flashinfer/jit/core.py",
        "./flashinfer/data/csrc/batch_prefill.cu",
        "./flashinfer/data/aot/norm/norm.so",
        "./flashinfer/data/aot/batch_prefill_bf16/batch_prefill_bf16.so",
    }
    here, there = calls
    assert any(argument.startswith("flashinfer-python==") for argument in here)
    assert "--python-version=3.11" in there and "--only-binary=:all:" in there and bring.TVM_FFI in there
