"""Packs FlashInfer for a GPU machine that has torch and CUDA but no network: one archive, kernels compiled here.

    python -m benchmarks.gpu.bring

needs nvcc (CUDA_HOME, else /usr/local/cuda) and ten minutes of a core. On the machine:

    mkdir -p /tmp/site && tar -xJf .bring/flashinfer.tar.xz -C /tmp/site
    export PYTHONPATH=/tmp/site

Of FlashInfer's dependencies, what attention, norm, rope and activation import is brought along or is on any
machine with torch (einops, nvidia-ml-py, tabulate, tqdm, requests, click, packaging: bring what is not
there with --also). CUTLASS DSL, cuDNN's frontend, NCCL's extensions, cuda-tile and cuda-python stay away.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = "flashinfer.tar.xz"
TVM_FFI = "apache-tvm-ffi>=0.1.11,<0.2"
# To import flashinfer here.
NEEDED_HERE = ("nvidia-ml-py", "einops", "tabulate")
# A few headers of theirs are included; CUDA's compiler alone comes without.
HEADERS = ("nvidia-cublas>=13.0,<13.2", "nvidia-curand>=10.4,<10.5")
PLATFORMS = [f"manylinux{name}_x86_64" for name in ("_2_34", "_2_28", "_2_24", "_2_17", "2014")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version of Python there (default: %(default)s)")
    parser.add_argument("--arch", default="9.0a", help="of the GPU there (default: %(default)s, H100 and H200)")
    parser.add_argument("--out", type=Path, default=ROOT / ".bring", help="folder (default: .bring)")
    parser.add_argument("--also", nargs="*", default=[], metavar="PACKAGE", help="more to bring, without dependencies")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    here, there = out / "here", out / "there"
    flashinfer = _pinned("flashinfer-python")

    if not (here / "flashinfer").exists():
        _pip("install", "--target", here, flashinfer, TVM_FFI, *NEEDED_HERE)
    kernels = _compile(here, out / "build", arguments.arch)

    shutil.rmtree(there, ignore_errors=True)
    platforms = [f"--platform={name}" for name in PLATFORMS]
    wheels = ("--only-binary=:all:", f"--python-version={arguments.python}", *platforms)
    _pip("install", "--no-compile", "--target", there, *wheels, TVM_FFI, *arguments.also)
    shutil.copytree(here / "flashinfer", there / "flashinfer", ignore=shutil.ignore_patterns("data", "__pycache__"))
    data = there / "flashinfer" / "data"
    # Rendered on the way to a compiled kernel, too.
    for source in (here / "flashinfer" / "data" / "csrc").glob("batch_prefill*"):
        (data / "csrc").mkdir(parents=True, exist_ok=True)
        shutil.copy(source, data / "csrc")
    for kernel in kernels:
        target = data / "aot" / kernel.stem
        target.mkdir(parents=True)
        shutil.copy(kernel, target)
        print(f"{kernel.stat().st_size / 2**20:6.1f} MiB  {kernel.name[:100]}")
    with tarfile.open(out / ARCHIVE, "w:xz", preset=6) as archive:
        archive.add(there, arcname=".")
    print(f"{(out / ARCHIVE).stat().st_size / 2**20:6.1f} MiB  {out / ARCHIVE}")


def _pinned(package: str) -> str:
    found = re.search(rf'"({package}==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert found, f"pyproject.toml names {package}"
    return found[1]


def _pip(command: str, *arguments: str | Path) -> None:
    pip = [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, *map(str, arguments)], check=True)


def _compile(site: Path, build: Path, arch: str) -> list[Path]:
    """The shared objects of all kernels."""
    build.mkdir(parents=True, exist_ok=True)
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(site), str(ROOT))),
        "FLASHINFER_CUDA_ARCH_LIST": arch,
        "FLASHINFER_WORKSPACE_BASE": str(build),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{_driver_stub(build)}",
        "CUDA_HOME": str(cuda),
        "MAX_JOBS": os.environ.get("MAX_JOBS", "1"),
    }
    if not (cuda / "include" / "cublas_v2.h").exists():
        env["FLASHINFER_EXTRA_CUDAFLAGS"] = f"-isystem {_headers(build)}"
    subprocess.run([sys.executable, "-m", "benchmarks.gpu.flashinfer_kernels"], check=True, cwd=ROOT, env=env)
    return sorted(build.glob(".cache/flashinfer/*/*/cached_ops/*/*.so"))


def _driver_stub(build: Path) -> Path:
    """Where an empty libcuda.so lies, to link against on a machine without the driver."""
    folder = build / "stub"
    folder.mkdir(exist_ok=True)
    link = ["cc", "-shared", "-o", str(folder / "libcuda.so"), "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull]
    subprocess.run(link, check=True)
    return folder


def _headers(build: Path) -> Path:
    """CUDA's headers that come with libraries; of these, nothing else is kept."""
    folder = build / "headers"
    found = next(folder.rglob("cublas_v2.h"), None)
    if found is None:
        _pip("install", "--target", folder, *HEADERS)
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix not in (".h", ".hpp"):
                path.unlink()
        found = next(folder.rglob("cublas_v2.h"))
    return found.parent


if __name__ == "__main__":
    main()
