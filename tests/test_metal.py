"""The Metal kernels and what queues them: their text against the host's table, kernels and host run on the CPU, the patch and its call sites.

No Metal compiler has seen the kernels, and nothing has run on an Apple GPU.
"""

from __future__ import annotations

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


def sources() -> list[Path]:
    return sorted(METAL.glob("*.metal"))


def kernels() -> dict[str, str]:
    """Name of each kernel -> its parameters, macros written out."""
    found = {}
    for path in sources():
        text = path.read_text(encoding="utf-8").replace("\\\n", "\n")
        for head, parameters in re.findall(r"kernel void (\w+(?:##\w+)?)\((.*?)\) \{", text, re.DOTALL):
            stem = head.split("##")[0]
            sizes = re.findall(rf"^EDGEKV_{stem.removeprefix('edgekv_').rstrip('_').upper()}\((\w+)", text, re.MULTILINE) if "##" in head else [""]
            found |= {stem + size: parameters for size in sizes}
    return found


def table() -> dict[str, tuple[str, list[str]]]:
    """The host's table: name -> (struct of its arguments, names of its buffers)."""
    text = (METAL / "edgekv-dispatch.h").read_text(encoding="utf-8")
    return {name: (struct, buffers.split()) for name, struct, buffers in re.findall(r'\{ "(\w+)",\s+sizeof\((\w+)\),\s+"([^"]*)" \}', text)}


def test_the_host_knows_every_kernel():
    assert set(kernels()) == set(table())
    assert len(table()) >= 12


@pytest.mark.parametrize("name", sorted(table()))
def test_buffers_are_where_the_host_puts_them(name):
    struct, expected = table()[name]
    found = re.findall(r"(\w+) (?:\* |& )?(\w+) \[\[buffer\((\d+)\)\]\]", kernels()[name])
    assert [int(at) for _, _, at in found] == list(range(len(expected) + 1))
    assert (found[0][0], [buffer for _, buffer, _ in found[1:]]) == (struct, expected)


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_pointers_name_their_address_space(path):
    """C++ does not ask for it, Metal does; nor has Metal's language lambdas, doubles or casts by name."""
    for file in (path, *METAL.glob("edgekv-[vl]*.h")):
        text = re.sub(r"//.*", "", file.read_text(encoding="utf-8"))
        for pointer in re.findall(r"[\w<> ]+ [*&]+(?: ?\w+|\))", text):
            if re.search(r"\b(?:float|int|char|int8_t|U|half|uchar|ushort|uint|edgekv_metal_\w+|attend_state<D>) [*&]", pointer):
                assert re.search(r"\b(?:device|constant|threadgroup|thread)\b", pointer), f"{file.name}: {pointer.strip()}"
        assert not re.search(r"\bdouble\b|_cast<|\[[&=]\]|\bstd::", text), file.name


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for Metal needs Linux")
def test_metal_kernels_agree_with_plain_loops():
    """Their source, compiled as C++: what they compute, not that Metal would take it."""
    check_passed(run(program("test-metal")))


def errors_of_clang(text: str) -> list[str]:
    """What C++ for OpenCL says of the one source: it has Metal's address spaces under other names. Warnings count: where Metal has some,
    upstream may take the library for one that did not compile."""
    cindex = pytest.importorskip("clang.cindex", reason="libclang is missing: pip install libclang")
    words = ROOT / "native" / "tests" / "metal" / "spaces"
    flags = ["-x", "clcpp", "-cl-std=clc++2021", "-target", "spir64-unknown-unknown", "-cl-no-stdinc", f"-I{words}", "-D__METAL_VERSION__=300",
             "-Wall", "-Wextra", "-Wunused-const-variable", "-Wno-unknown-attributes", "-Wno-ignored-attributes"]
    unit = cindex.Index.create().parse("kernels.clcpp", args=flags, unsaved_files=[("kernels.clcpp", text)])
    return [str(said) for said in unit.diagnostics if said.severity >= cindex.Diagnostic.Warning]


@pytest.mark.parametrize(("right", "wrong"), [
    ("", ""),
    ("threadgroup float * tops = shared + QUERIES*D;", "device float * tops = shared + QUERIES*D;"),
    ("inline float read_half(device const char * p)", "inline float read_half(threadgroup const char * p)"),
    ("thread attend_state<D> & st)", "device attend_state<D> & st)"),
    ("    (void) shared;\n", ""),
    ("device float * norm [[buffer(8)]]", "constant float * norm [[buffer(8)]]"),
])
def test_address_spaces_fit_each_other(right, wrong):
    """Through calls, templates and casts, as clang sees it; with one word wrong it complains. It is not Metal's compiler."""
    text = re.sub(r'(#include "[^"]*"|#pragma once)\n', "", "".join((METAL / name).read_text(encoding="utf-8") for name in files_of_one_source()))
    assert right in text
    assert bool(errors_of_clang(text.replace(right, wrong) if right else text)) == bool(right)


# ---- the host


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for Metal needs Linux")
@pytest.mark.parametrize("name", ["test-metal-host", "test-metal-names"])
def test_calls_go_through_upstreams_metal_backend(name):
    """Patched, with our host code in it; what is Objective-C there is native/tests/metal/fake-metal.cpp."""
    check_passed(run(program(name)))


def files_of_one_source() -> list[str]:
    """The kernels' files in the order in which native/metal-source.cmake puts them together."""
    listed = re.search(r"foreach\(name ([^)]*)\)", (ROOT / "native" / "metal-source.cmake").read_text(encoding="utf-8")).group(1).split()
    return [f"edgekv-{name}" for name in listed]


def test_one_source_has_every_file_behind_what_it_includes():
    order = files_of_one_source()
    assert {path.name for path in sources()} <= set(order)
    for at, name in enumerate(order):
        included = re.findall(r'#include "([^"]*)"', (METAL / name).read_text(encoding="utf-8"))
        assert set(included) <= set(order[:at]), name


CALL_SITES = ("ggml-metal.cpp", "ggml-metal-ops.cpp")
HOST = sorted(path.name for path in METAL.glob("*.cpp"))


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("g++"), reason="tried with g++ on Linux")
@pytest.mark.parametrize("source", [*CALL_SITES, *HOST])
def test_call_sites_compile(source):
    """Upstream's files with our calls, with and without them, and the files that they call. <memory> comes along only in Apple's C++ library."""
    folder = upstream() / "ggml" / "src" / "ggml-metal"
    includes = [f"-I{path}" for path in (METAL.parent, METAL, folder.parent, upstream() / "ggml" / "include")]
    path, flags = (METAL / source, ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]) if source in HOST else (folder / source, ["-include", "memory"])
    for define in ["-DEDGEKV_METAL"], []:
        done = subprocess.run(["g++", "-std=c++17", "-fsyntax-only", *flags, *define, *includes, str(path)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]


def test_the_patch_is_nothing_without_our_define():
    """Of Metal's files: it only adds lines, all of them inside of #ifdef EDGEKV_METAL."""
    patch = (ROOT / "patches" / "metal.patch").read_text(encoding="utf-8")
    changed = re.split(r"^diff --git .*\n", patch, flags=re.MULTILINE)[1:]
    names = [re.search(r"^\+\+\+ b/(\S+)", part, re.MULTILINE).group(1) for part in changed]
    assert [Path(name).name for name in names] == ["ggml-backend.cpp", "ggml-metal-ops.cpp", "ggml-metal.cpp"]
    for name, part in zip(names, changed, strict=True):
        lines = [line for line in part.splitlines() if re.match(r"[+-](?![+-])", line)]
        assert not any(line.startswith("-") for line in lines), name
        if Path(name).name not in CALL_SITES:  # an assertion about custom nodes, of which there are none without us
            assert len(lines) == 1
            continue
        inside = False
        for line in lines:
            opens, closes = line == "+#ifdef EDGEKV_METAL", line == "+#endif"
            assert inside or opens or line == "+", f"{name}: {line}"
            inside = opens or (inside and not closes)
        assert not inside
