"""The package's modules import each other without circles, imports for type checks and in functions
included.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.lib import ROOT

PACKAGE = ROOT / "edgekv"


def modules() -> dict[str, Path]:
    """Every module of the package by its name; the bindings are not ours."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "llama_cpp" not in parts:
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


def test_no_modules_import_each_other_in_a_circle():
    found = modules()
    graph = {name: imported(path, set(found)) - {name} for name, path in found.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None
    assert graph["edgekv.engine"] > {"edgekv.native"}, "the graph was not read"
