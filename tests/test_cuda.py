"""Our CUDA sources, and the file of llama.cpp that calls them, through nvcc, wherever it is: no
warnings, no spills in attend.

This says that they compile. What the kernels compute is tested in test_native.py on the CPU;
neither says that they run on a GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import cublas
from tests.lib import ROOT

KERNELS = ROOT / "native" / "src" / "cuda"
SOURCES = """
    edgekv-attend.cu edgekv-score.cu edgekv-predict.cu edgekv-evict.cu edgekv-merge.cu
""".split()
ARCHITECTURES = (75, 86, 120)
"""The oldest, the newest, and one between them: nvcc needs some 40 s for each."""
FLAGS = """
    -std=c++17 -O3 -use_fast_math -Werror all-warnings -Xcompiler
    -Wall,-Wextra,-Wmissing-declarations,-Werror -Xptxas -v
""".split()


def upstream() -> Path:
    """The patched llama.cpp: EDGEKV_UPSTREAM_TREE, or what a build unpacked."""
    folder = Path(os.environ.get("EDGEKV_UPSTREAM_TREE") or ROOT / "build" / "upstream")
    if not (folder / "ggml").is_dir():
        pytest.skip(f"llama.cpp is not in {folder}: build once, or set EDGEKV_UPSTREAM_TREE")
    return folder


def compile_for(architecture: int, source: Path, out: Path, *flags: str) -> str:
    """What nvcc says of a source that compiles without a warning."""
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is missing")
    include = [
        f"-I{folder}"
        for folder in (
            upstream() / "ggml" / "include",
            upstream() / "ggml" / "src",
            KERNELS,
            KERNELS.parent,
        )
    ]
    done = subprocess.run(
        [
            "nvcc",
            *(flags or FLAGS),
            f"-arch=sm_{architecture}",
            *include,
            "-c",
            str(source),
            "-o",
            str(out),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def check_kernels(architecture: int, folder: Path) -> None:
    for source in SOURCES:
        said = compile_for(architecture, KERNELS / source, folder / "kernel.o")
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
        assert spills and all(pair == ("0", "0") for pair in spills), (
            f"{source} spills for sm_{architecture}:\n{said[-3000:]}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_without_spills(architecture, tmp_path):
    if architecture != 86 and os.environ.get("EDGEKV_ALL_ARCHITECTURES") != "1":
        pytest.skip("a minute each: set EDGEKV_ALL_ARCHITECTURES=1, as CI does")
    check_kernels(architecture, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["patched", "ours"])
def test_call_sites_compile(source, tmp_path):
    """ggml-cuda.cu with our calls, and the file that it calls. They include cuBLAS: its header
    comes with the toolkit, or from PyPI.
    """
    patched = upstream() / "ggml" / "src" / "ggml-cuda" / "ggml-cuda.cu"
    path = patched if source == "patched" else KERNELS / "edgekv-op.cu"
    compile_for(
        86,
        path,
        tmp_path / "calls.o",
        "-std=c++17",
        "-O1",
        "-extended-lambda",
        "-Werror",
        "all-warnings",
        "-DEDGEKV_CUDA",
        "-DGGML_CUDA_USE_GRAPHS",
        f"-I{cublas.folder()}",
    )
