"""Backends that are packages of their own: CUDA's is ten times as large as all of edgekv.

Such a package holds one library, libedgekv-ggml-cuda, and the build-info.json of the build that it
comes from. It is found by its name, and taken if it is of the same llama.cpp and the same patches.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

PACKAGES = {"edgekv_cuda13": "cuda", "edgekv_cuda12": "cuda"}
"""Name of the module -> its backend. The first one that has a device is taken."""
SAME = ("sha256", "patches")
"""What build-info.json must have in common: the pinned source archive and the patches."""

taken: list[str] = []
"""The module whose backend this process has."""


def installed() -> Iterator[tuple[str, Path]]:
    """(module, library) of each add-on that is installed, whether it can be taken or not."""
    for module, backend in PACKAGES.items():
        spec = importlib.util.find_spec(module)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            name = f"edgekv-ggml-{backend}"
            yield module, Path(folder) / (f"{name}.dll" if os.name == "nt" else f"lib{name}.so")


def fault(library: Path, folder: Path) -> str:
    """Why an add-on cannot be taken with the libraries in `folder`; empty if it can."""
    if not library.is_file():
        return f"{library} is missing: install it again"
    if _origin(library.parent) != _origin(folder):
        return "it was built for another version of edgekv: install the one of this version"
    return ""


def load(ggml: ctypes.CDLL, folder: Path) -> None:
    """Give ggml the add-on's backend; one without a device, or that fails, is passed over."""
    load_one = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(("ggml_backend_load", ggml))
    count = ctypes.CFUNCTYPE(ctypes.c_size_t)(("ggml_backend_dev_count", ggml))
    for module, library in installed():
        before = count()
        if not fault(library, folder) and load_one(os.fsencode(library)) and count() > before:
            taken.append(module)
            return


def _origin(folder: Path) -> dict[str, object]:
    try:
        info = json.loads((folder / "build-info.json").read_text(encoding="utf-8"))
        return {key: info[key] for key in SAME}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
