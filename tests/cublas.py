"""Headers of cuBLAS, which ggml-cuda includes: the toolkit's, or those of PyPI's nvidia-cublas,
fetched once for the CUDA that nvcc has.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.lib import ROOT, building

HEADER = "cublas_v2.h"


def folder() -> Path:
    """Where cublas_v2.h is. Skips where it cannot be had."""
    nvcc = shutil.which("nvcc")
    if not nvcc:
        pytest.skip("nvcc is missing")
    fetched = ROOT / "build" / f"cublas-{major(nvcc)}"
    named = os.environ.get("EDGEKV_CUBLAS")
    places = [
        *([Path(named)] if named else []),
        Path(nvcc).resolve().parent.parent / "include",
        *Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/include"),
        fetched,
    ]
    with building():
        if not any((place / HEADER).exists() for place in places):
            fetch(major(nvcc), fetched)
    return next(place for place in places if (place / HEADER).exists())


def major(nvcc: str) -> int:
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"release (\d+)\.", said).group(1))


def fetch(version: int, to: Path) -> None:
    """The headers out of pip's wheel of cuBLAS for this CUDA; its libraries, most of half a GB, do
    not stay. Skips if pip cannot get it.
    """
    package = f"nvidia-cublas=={version}.*" if version >= 13 else f"nvidia-cublas-cu{version}"
    to.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as scratch:
        words = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-cache-dir",
            "--only-binary=:all:",
            "--retries",
            "1",
            "--dest",
            scratch,
        ]
        try:
            done = subprocess.run([*words, package], capture_output=True, text=True, timeout=900)
            why = (
                (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
                if done.returncode
                else ""
            )
        except subprocess.TimeoutExpired:
            why = "it took more than 15 minutes"
        wheel = next(Path(scratch).glob("*.whl"), None)
        if why or not wheel:
            pytest.skip(
                f"{HEADER} is missing, and pip cannot get {package} ({why}): name its folder in"
                " EDGEKV_CUBLAS"
            )
        headers = Path(scratch) / "include"
        headers.mkdir()
        with ZipFile(wheel) as files:
            for name in files.namelist():
                if re.search(r"/include/\w+\.h(pp)?$", name):
                    (headers / Path(name).name).write_bytes(files.read(name))
        if not (headers / HEADER).exists():
            pytest.skip(f"{wheel.name} has no {HEADER}: name its folder in EDGEKV_CUBLAS")
        headers.rename(to)
