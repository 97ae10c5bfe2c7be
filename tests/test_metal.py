"""The Metal kernels and what queues them: run on the CPU, address spaces, the patch and its call
sites.

No Metal compiler has seen the kernels, and nothing has run on an Apple GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib import ROOT
from tests.test_cuda import upstream
from tests.test_native import check_passed, program, run

METAL = ROOT / "native" / "src" / "metal"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for Metal needs Linux")
def test_metal_kernels_agree_with_plain_loops():
    """Their source, compiled as C++: what they compute, not that Metal would take it."""
    check_passed(run(program("test-metal")))


def errors_of_clang(text: str) -> list[str]:
    """What C++ for OpenCL says of the one source: it has Metal's address spaces under other names.
    Warnings count: where Metal has some, upstream may take the library for one that did not
    compile.
    """
    cindex = pytest.importorskip("clang.cindex", reason="libclang is missing: pip install libclang")
    words = ROOT / "native" / "tests" / "metal" / "spaces"
    flags = [
        "-x",
        "clcpp",
        "-cl-std=clc++2021",
        "-target",
        "spir64-unknown-unknown",
        "-cl-no-stdinc",
        f"-I{words}",
        "-D__METAL_VERSION__=300",
        "-Wall",
        "-Wextra",
        "-Wunused-const-variable",
        "-Wno-unknown-attributes",
        "-Wno-ignored-attributes",
    ]
    unit = cindex.Index.create().parse(
        "kernels.clcpp", args=flags, unsaved_files=[("kernels.clcpp", text)]
    )
    return [str(said) for said in unit.diagnostics if said.severity >= cindex.Diagnostic.Warning]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("", ""),
        (
            "threadgroup float * tops = shared + QUERIES * D;",
            "device float * tops = shared + QUERIES * D;",
        ),
        (
            "inline float read_half(device const char * p)",
            "inline float read_half(threadgroup const char * p)",
        ),
        ("thread attend_state<D> & st)", "device attend_state<D> & st)"),
        ("    (void) shared;\n", ""),
        ("device float * norm [[buffer(8)]]", "constant float * norm [[buffer(8)]]"),
    ],
)
def test_address_spaces_fit_each_other(right, wrong):
    """Through calls, templates and casts, as clang sees it; with one word wrong it complains. It is
    not Metal's compiler.
    """
    text = re.sub(
        r'(#include "[^"]*"|#pragma once)\n',
        "",
        "".join((METAL / name).read_text(encoding="utf-8") for name in files_of_one_source()),
    )
    assert right in text
    assert bool(errors_of_clang(text.replace(right, wrong) if right else text)) == bool(right)


# ---- the host


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for Metal needs Linux")
@pytest.mark.parametrize("name", ["test-metal-host", "test-metal-names"])
def test_calls_go_through_upstreams_metal_backend(name):
    """Patched, with our host code in it; what is Objective-C there is
    native/tests/metal/fake-metal.cpp.
    """
    check_passed(run(program(name)))


def files_of_one_source() -> list[str]:
    """The kernels' files in the order in which native/metal-source.cmake puts them together."""
    listed = (
        re.search(
            r"foreach\(name ([^)]*)\)",
            (ROOT / "native" / "metal-source.cmake").read_text(encoding="utf-8"),
        )
        .group(1)
        .split()
    )
    return [f"edgekv-{name}" for name in listed]


CALL_SITES = ("ggml-metal.cpp", "ggml-metal-ops.cpp")
HOST = sorted(path.name for path in METAL.glob("*.cpp"))


@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("g++"), reason="tried with g++ on Linux"
)
@pytest.mark.parametrize("source", [*CALL_SITES, *HOST])
def test_call_sites_compile(source):
    """Upstream's files with our calls, with and without them, and the files that they call.
    <memory> comes along only in Apple's C++ library.
    """
    folder = upstream() / "ggml" / "src" / "ggml-metal"
    includes = [
        f"-I{path}"
        for path in (METAL.parent, METAL, folder.parent, upstream() / "ggml" / "include")
    ]
    path, flags = (
        (METAL / source, ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function"])
        if source in HOST
        else (folder / source, ["-include", "memory"])
    )
    for define in ["-DEDGEKV_METAL"], []:
        done = subprocess.run(
            ["g++", "-std=c++17", "-fsyntax-only", *flags, *define, *includes, str(path)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("g++"), reason="tried with g++ on Linux"
)
def test_the_patch_is_nothing_without_our_define(tmp_path):
    """Without EDGEKV_METAL the patched files are upstream's to the compiler."""

    def plain(source: Path) -> str:
        """Without headers, whose macros would say line numbers."""
        text = re.sub(r"^#include.*", "", source.read_text(encoding="utf-8"), flags=re.MULTILINE)
        command = ["g++", "-E", "-P", "-x", "c++", "-"]
        return subprocess.run(
            command, input=text, capture_output=True, text=True, check=True
        ).stdout

    folder = Path("ggml", "src", "ggml-metal")
    (tmp_path / folder).mkdir(parents=True)
    for name in CALL_SITES:
        shutil.copy(upstream() / folder / name, tmp_path / folder / name)
    patch = ROOT / "patches" / "metal.patch"
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(
        ["git", "apply", "-R", "--include=*/ggml-metal/*", patch],
        cwd=tmp_path,
        check=True,
        env=outside,
    )
    for name in CALL_SITES:
        patched, without = upstream() / folder / name, tmp_path / folder / name
        assert patched.read_bytes() != without.read_bytes()
        assert len(plain(without)) > 10_000 and plain(patched) == plain(without), name
