#!/usr/bin/env python3
"""Build a wheel for old and new processors: it holds one CPU library for each kind of them.

    native/wheel.py --out dist          needs auditwheel and patchelf on Linux

The processor that it is built on does not matter; the C library does: the wheel runs where it is as
new as here, or newer. auditwheel puts the OpenMP library in and writes the tag. CMAKE_ARGS are
added, for instance -DGGML_VULKAN=ON.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = "-DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON -DGGML_NATIVE=OFF"
DRIVERS = ("libcuda.so.1", "libvulkan.so.1")
"""Libraries that come with a driver, and are never put in."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("dist"))
    out = parser.parse_args().out
    # Old systems, on which wheels are built, have Pythons that edgekv itself does not run on.
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--ignore-requires-python"]
    with tempfile.TemporaryDirectory() as folder:
        run(
            [*pip_wheel, "--no-deps", "-w", folder, str(ROOT)],
            CMAKE_ARGS=f"{OPTIONS} {os.environ.get('CMAKE_ARGS', '')}",
        )
        (wheel,) = Path(folder).glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        if sys.platform == "linux":
            left_out = [word for name in DRIVERS for word in ("--exclude", name)]
            run([sys.executable, "-m", "auditwheel", "repair", *left_out, "-w", str(out), wheel])
        else:
            (out / wheel.name).write_bytes(wheel.read_bytes())


def run(command: list[str | Path], **env: str) -> None:
    if code := subprocess.run(command, env={**os.environ, **env}).returncode:
        raise SystemExit(f"`{' '.join(map(str, command[:5]))} ...` failed with exit code {code}")


if __name__ == "__main__":
    main()
