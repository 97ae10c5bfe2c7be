"""The native library as a file: where it lies, how it is opened, and what it logs.

It may share a process with a stock llama-cpp-python: file names, and so the names by which the
system's loader knows a library, begin with `edgekv-`. The bindings are `edgekv.llama_cpp`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from edgekv.base import addons
from edgekv.errors import EdgeKVError


def lib_dir() -> Path:
    """Return the folder of the native libraries: EDGEKV_LIB, or the one inside the package; for the
    sources of a checkout that of an installed one.
    """
    if named := os.environ.get("EDGEKV_LIB"):
        return Path(named)
    inside = [Path(part) / "lib" for part in sys.modules["edgekv"].__path__]
    return next((folder for folder in inside if folder.is_dir()), inside[0])


def library_path(name: str) -> Path:
    """Return the file of one library: 'llama', 'ggml' or 'ggml-base'.

    The unpatched libraries, which tests and benchmarks name in EDGEKV_LIB, have no prefix.
    Raises EdgeKVError if there is none.
    """
    folder = lib_dir()
    for stem in (f"edgekv-{name}", name):
        for file in (f"lib{stem}.so", f"lib{stem}.dylib", f"{stem}.dll", f"lib{stem}.dll"):
            if (folder / file).is_file():
                return folder / file
    raise EdgeKVError(
        f"the native library is missing in {folder}: build and install edgekv with 'pip install .'"
    )


@contextmanager
def _patient_threads() -> Iterator[None]:
    """A `with` block that loads GNU's OpenMP, whose threads then sleep soon where they wait.

    They spin for milliseconds otherwise, some hundred times a token: where processes share the
    cores, each burns the time in which the other's missing thread could run. The OpenMP library
    looks at the environment once, when it is loaded; a user's own setting stands.
    """
    if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = "1000"
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]


def _load_backends(folder: Path) -> None:
    """Open the backends that are packages of their own, and those of a build that has them as
    libraries of their own: of the CPU's, the one that fits this processor best. Other builds are
    linked to theirs.
    """
    ggml = ctypes.CDLL(str(library_path("ggml")))
    addons.load(ggml, folder)
    if any(folder.glob("*edgekv-ggml-cpu-*")):
        ggml.ggml_backend_load_all_from_path(ctypes.c_char_p(os.fsencode(folder)))


@cache
def open_llama() -> ctypes.CDLL:
    """Return llama.cpp's library, opened once per process. From then on it logs nothing.

    Raises EdgeKVError if it is missing or cannot be loaded.
    """
    path = library_path("llama")
    if hasattr(os, "add_dll_directory"):  # Windows
        os.add_dll_directory(str(path.parent))
    try:
        with _patient_threads():
            lib = ctypes.CDLL(str(path))
            if hasattr(lib, "edgekv_log_init"):
                lib.edgekv_log_init()
                lib.edgekv_log_error.restype = ctypes.c_char_p
                _load_backends(path.parent)
    except OSError as error:
        raise EdgeKVError(f"the native library {path} cannot be loaded: {error}") from None
    return lib


def set_verbose(verbose: bool) -> None:
    """Print on standard error whatever llama.cpp logs, or nothing, in the whole process."""
    lib = open_llama()
    if hasattr(lib, "edgekv_log_verbose"):
        lib.edgekv_log_verbose(ctypes.c_bool(verbose))


@contextmanager
def muted() -> Iterator[None]:
    """Print nothing of what llama.cpp logs in this thread: models that nobody will use."""
    lib = open_llama()
    if not hasattr(lib, "edgekv_log_mute"):
        yield
        return
    lib.edgekv_log_mute(ctypes.c_bool(True))
    try:
        yield
    finally:
        lib.edgekv_log_mute(ctypes.c_bool(False))


def logged_error() -> str:
    """Return the first error that llama.cpp logged since the last call, one line; empty if none."""
    lib = open_llama()
    if not hasattr(lib, "edgekv_log_error"):
        return ""
    return " ".join((lib.edgekv_log_error() or b"").decode(errors="replace").split())
