"""The packages' modules import each other without circles, imports for type checks and in functions
included; so do the native sources.
"""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.lib import ROOT

PACKAGES = (ROOT / "edgekv", ROOT / "lab" / "edgekv_lab")
NATIVE = ROOT / "native" / "src"
SOURCES = (".h", ".cpp", ".cu", ".cuh", ".metal")
FOLDERS = ("", "device", "store", "prefill", "attend")  # that the compiler looks into
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def modules() -> dict[str, Path]:
    """Every module of edgekv and of its lab by its name; the bindings are not ours."""
    found = {}
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            parts = path.relative_to(package.parent).with_suffix("").parts
            if parts[1] != "llama_cpp":
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, names: set[str]) -> set[str]:
    """The modules among `names` that the module in `path` imports, wherever the statement
    stands.
    """
    out = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and not node.level, f"{path}: a relative import"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            out |= {name if name in names else node.module for name in whole}
    return out & names


def included(path: Path) -> set[Path]:
    """The files of native/src that the one in `path` includes: beside it, or as the compiler looks
    for them.
    """
    names = INCLUDE.findall(path.read_text(encoding="utf-8"))
    places = [path.parent, *(NATIVE / folder for folder in FOLDERS)]
    found = [next((p / name for p in places if (p / name).is_file()), None) for name in names]
    return {p.resolve() for p in found if p and p.resolve().is_relative_to(NATIVE.resolve())}


def unit(path: Path) -> str:
    """A source and its header are one: what either includes, both need."""
    return path.relative_to(NATIVE.resolve()).with_suffix("").as_posix()


def acyclic(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_no_modules_import_each_other_in_a_circle():
    found = modules()
    graph = {name: imported(path, set(found)) - {name} for name, path in found.items()}
    acyclic(graph)
    assert graph["edgekv.engine.engine"] > {"edgekv.native"}, "the graph was not read"


def test_no_native_sources_include_each_other_in_a_circle():
    graph: dict[str, set[str]] = {}
    for path in NATIVE.resolve().rglob("*"):
        if path.suffix in SOURCES:
            graph.setdefault(unit(path), set()).update(map(unit, included(path)))
    acyclic({name: below - {name} for name, below in graph.items()})
    below = {"store/edgekv-layer", "store/edgekv-table"}
    assert graph["store/edgekv-store"] >= below, "the graph was not read"
