"""Rooms are the packages' folders, and the files beside them. A room imports only those that stand
before it in ROOMS.

Imports inside functions and for type checks count too. `test_imports` looks at modules: files
without a circle may still make one of their folders.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from edgekv import llama_cpp
from tests.test_imports import modules

ROOMS = """
version errors base documents library native model methods memory profiles choice engine
conversation grammars chat llama learn __init__ models kept serve commands bundling
__main__ lab/__init__ lab/markdown lab/plotting lab/process lab/record lab/saved lab/sides lab/eval
lab/makers lab/bench lab/experiments lab/__main__ lab/commands
""".split()
"""From what everything stands on to what nothing imports."""

HELP = "the help of the command line is quick"
LIBRARY = "the module is of use before the native library is loaded"
LATER = {
    "commands": HELP,
    "lab/bench": HELP,
    "lab/sides": "a side loads its own library, after the process has begun",
    "lab/commands": HELP,
    "edgekv.choice.config": HELP,
    "edgekv.model.loading": HELP,
    "edgekv.methods.centroid_merge": LIBRARY,
    "edgekv.model.adapters": LIBRARY,
    "edgekv.learn.later": "Ctrl-C is switched off first",
    "edgekv.learn.prepare": LIBRARY,
}
"""Rooms and modules that import inside of functions, and why."""


def room(module: str) -> str:
    """The folder, or the file beside the folders; behind lab/ where it is the lab's."""
    package, name, *_ = [*module.split("."), "__init__"]
    return f"lab/{name}" if package == "edgekv_lab" else name


def face(found: dict[str, Path]) -> dict[str, str]:
    """The public names that `edgekv` brings along with their first use -> their module."""
    tree = ast.parse(found["edgekv"].read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def imports(path: Path, found: dict[str, Path]) -> Iterator[tuple[str, bool]]:
    """(module, whether the statement stands in a function) of each import of the package's."""
    names = face(found)

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((x.name, inside) for x in child.names if x.name in found)
            elif isinstance(child, ast.ImportFrom) and child.module in found:
                for alias in child.names:
                    whole = f"{child.module}.{alias.name}"
                    public = names.get(alias.name, "edgekv") if child.module == "edgekv" else ""
                    yield whole if whole in found else public or child.module, inside
            inner = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from walk(child, inner)

    return walk(ast.parse(path.read_text(encoding="utf-8")), False)


FOUND = modules()
IMPORTS = {name: set(imports(path, FOUND)) for name, path in FOUND.items()}


def test_every_room_has_its_place():
    assert sorted(ROOMS) == sorted({room(name) for name in FOUND})


def test_rooms_import_only_rooms_before_them():
    place = {name: i for i, name in enumerate(ROOMS)}
    against = {
        f"{name} -> {other}"
        for name, others in IMPORTS.items()
        for other, _ in others
        if place[room(other)] > place[room(name)]
    }
    assert sorted(against) == []


def test_imports_stand_at_the_top_or_have_a_reason():
    late = {name for name, others in IMPORTS.items() if any(inside for _, inside in others)}
    late = {room(name) if room(name) in LATER else name for name in late}
    assert sorted(late - LATER.keys()) == [], "an import inside of a function has no reason"
    assert sorted(LATER.keys() - late) == [], "no longer so: take it out of LATER"


def test_the_imports_were_read():
    assert ("edgekv.llama.llama", True) in IMPORTS["edgekv.commands.load"], "by way of `edgekv`"


OWNERS = ("llama", "engine")
"""The rooms that know what `edgekv.Llama`, its parent's private names included, is made of."""


def private_names(tree: ast.AST) -> Iterator[str]:
    """What objects of the classes in a module have of their own: methods and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_own(node):
            yield node.attr
        elif isinstance(node, ast.FunctionDef) and node.args.args[:1]:
            yield node.name


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_other_room_uses_what_is_private_to_a_model():
    """Of other objects than its own: `llm._ctx` is, `self._model` of some other class is not."""
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FOUND.items()}
    of_llama = [tree for name, tree in trees.items() if room(name) == "llama"]
    parent = ast.parse(Path(llama_cpp.llama.__file__).read_text(encoding="utf-8"))
    private = {x for tree in [*of_llama, parent] for x in private_names(tree) if is_private(x)}
    assert {"_ctx", "_requires_eval", "_logits_all", "_kv_config"} <= private, "they were read"
    used = {
        f"{name}: {node.attr}"
        for name, tree in trees.items()
        if room(name) not in OWNERS
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in private and not is_own(node)
    }
    assert sorted(used) == []


def test_no_other_room_says_that_a_model_has_private_names():
    """A protocol with a private name is another way to use it."""
    said = {
        f"{name}: {one.target.id}"
        for name, path in FOUND.items()
        for kind in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(kind, ast.ClassDef) and "Protocol" in map(ast.unparse, kind.bases)
        for one in kind.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        if is_private(one.target.id)
    }
    assert sorted(said) == []


MOST_ARGUMENTS = 8
LONGER = {"edgekv.llama.loaded.__init__": "arguments of `edgekv.Llama`, which people name"}


def test_no_signature_is_long():
    """What belongs together is one value."""
    longer = set()
    for module, path in FOUND.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = {x.arg for x in ast.iter_child_nodes(node.args) if isinstance(x, ast.arg)}
                if len(names - {"self", "cls"}) > MOST_ARGUMENTS:
                    longer.add(f"{module}.{node.name}")
    assert longer == LONGER.keys()
