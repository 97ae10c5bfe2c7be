#!/usr/bin/env python3
"""Build the wheel of an add-on: edgekv-cuda12 or edgekv-cuda13, which hold ggml-cuda and no more.

    native/cuda_wheel.py --out dist     needs CUDA's toolkit with cuBLAS, cmake, ninja, patchelf,
                                        and Python's hatchling, wheel and auditwheel

edgekv finds such a package when it is installed beside it, if both are of the same sources
(edgekv/base/addons.py). CUDA's version is that of nvcc. CUDA's own libraries come from NVIDIA's
packages, which the wheel requires; the driver's come with the driver. CMAKE_ARGS are added, for
instance -DCMAKE_CUDA_ARCHITECTURES=90. Linux alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cuda"
OPTIONS = ("-DGGML_CUDA=ON", "-DGGML_BACKEND_DL=ON", "-DGGML_NATIVE=OFF")
LIBRARY = "libedgekv-ggml-cuda.so"
INFO = "build-info.json"


@dataclass(frozen=True)
class Toolkit:
    """What an add-on for a CUDA needs of NVIDIA's packages, and where they lie beside it."""

    requires: tuple[str, ...]
    folders: tuple[str, ...]


TOOLKITS = {
    12: Toolkit(
        ("nvidia-cublas-cu12", "nvidia-cuda-runtime-cu12"),
        ("nvidia/cublas/lib", "nvidia/cuda_runtime/lib"),
    ),
    13: Toolkit(("nvidia-cublas>=13,<14", "nvidia-cuda-runtime>=13,<14"), ("nvidia/cu13/lib",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("dist"))
    out = parser.parse_args().out
    cuda = major()
    options = [*OPTIONS, *os.environ.get("CMAKE_ARGS", "").split()]
    run(["cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *options])
    run(["cmake", "--build", BUILD, "--target", "ggml-cuda"])
    with tempfile.TemporaryDirectory() as folder:
        wheel = pack(BUILD / "bin" / LIBRARY, BUILD / INFO, cuda, Path(folder))
        out.mkdir(parents=True, exist_ok=True)
        # What NVIDIA's packages and the driver bring, and ggml-base, which edgekv has loaded.
        left_out = [
            word
            for name in ("libcuda*", "libcublas*", "libnccl*", "libedgekv-*")
            for word in ("--exclude", name)
        ]
        run([sys.executable, "-m", "auditwheel", "repair", *left_out, "-w", out, wheel])


def major() -> int:
    """Of nvcc's CUDA."""
    try:
        said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    except OSError:
        said = ""
    found = re.search(r"release (\d+)\.", said)
    if not found or int(found[1]) not in TOOLKITS:
        raise SystemExit("no nvcc of CUDA 12 or 13 is in PATH: install that toolkit")
    return int(found[1])


def pack(library: Path, info: Path, cuda: int, out: Path) -> Path:
    """The wheel, in `out`: `library` as it is but for its run path, and its `info`."""
    module, toolkit = f"edgekv_cuda{cuda}", TOOLKITS[cuda]
    source = out / "source"
    package = source / module
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f'"""CUDA {cuda} for edgekv."""\n', encoding="utf-8")
    shutil.copy(library, package / LIBRARY)
    shutil.copy(info, package / INFO)
    folders = ":".join(f"$ORIGIN/../{folder}" for folder in toolkit.folders)
    run(["patchelf", "--set-rpath", folders, package / LIBRARY])
    shutil.copy(ROOT / "LICENSE", source)
    (source / "pyproject.toml").write_text(project(module, toolkit), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    run([*pip, "-w", out, source])
    (wheel,) = out.glob("*.whl")
    tag = f"linux_{platform.machine()}"
    run([sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, wheel])
    (wheel,) = out.glob("*.whl")
    return wheel


def project(module: str, toolkit: Toolkit) -> str:
    """The text of its pyproject.toml."""
    version = runpy.run_path(str(ROOT / "edgekv" / "version.py"))["__version__"]
    requires = [f"edgekv=={version}", *toolkit.requires]
    return f"""\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{module.replace("_", "-")}"
version = "{version}"
description = "CUDA for edgekv"
license = "MIT"
requires-python = ">=3.10"
dependencies = {requires}

[tool.hatch.build.targets.wheel]
packages = ["{module}"]
"""


def run(command: list[str | Path]) -> None:
    if code := subprocess.run(command, stdout=sys.stderr).returncode:
        raise SystemExit(f"`{' '.join(map(str, command[:5]))} ...` failed with exit code {code}")


if __name__ == "__main__":
    main()
