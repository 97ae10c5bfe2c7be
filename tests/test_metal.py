"""The Metal kernels' text against the host's table, and the kernels run on the CPU: no Metal compiler has seen them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.lib import ROOT
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
