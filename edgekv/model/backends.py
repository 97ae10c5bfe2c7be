"""The devices of ggml's backends, by functions of ggml that the bindings leave out."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from edgekv.base import addons
from edgekv.library import lib_dir, library_path
from edgekv.native import llama_cpp


class Device(NamedTuple):
    """A device, the CPU among them. memory_total, memory_free: bytes, now."""

    name: str
    description: str
    memory_total: int
    memory_free: int
    buffer: str
    """The name of its type of buffer."""
    buffer_type: int
    """The address of that type."""


@cache
def function(library: str, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A C function with a prototype of its own: nobody else's is changed."""
    loaded = ctypes.CDLL(str(library_path(library)))
    return ctypes.CFUNCTYPE(result, *arguments)((name, loaded))


def _of_device(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    return function("ggml-base", f"ggml_backend_dev_{name}", result, c_void_p, *arguments)


def devices() -> list[Device]:
    """All devices there are."""
    llama_cpp.llama_backend_init()  # loads the backends
    count = function("ggml", "ggml_backend_dev_count", c_size_t)
    get = function("ggml", "ggml_backend_dev_get", c_void_p, c_size_t)
    return [_device(get(i)) for i in range(count())]


def _device(address: int) -> Device:
    free, total = c_size_t(), c_size_t()
    sizes = _of_device("memory", None, POINTER(c_size_t), POINTER(c_size_t))
    sizes(address, free, total)
    kind = _of_device("buffer_type", c_void_p)(address)
    name = function("ggml-base", "ggml_backend_buft_name", c_char_p, c_void_p)
    return Device(
        _of_device("name", c_char_p)(address).decode(),
        _of_device("description", c_char_p)(address).decode(),
        total.value,
        free.value,
        name(kind).decode() if kind else "",
        kind or 0,
    )


REGISTERED = {"metal": "MTL", "hip": "ROCm"}
"""ggml's names of backends whose libraries are called otherwise, whatever the case."""


def passed_over() -> list[str]:
    """Backends that are not used, and an NVIDIA driver that none uses: a line each, with why."""
    llama_cpp.llama_backend_init()  # loads the backends
    lines = []
    for path in sorted(lib_dir().glob("*edgekv-ggml-*")):
        found = re.fullmatch(r"(?:lib)?edgekv-ggml-([a-z]+)\.(?:so|dll|dylib)", path.name)
        # A server in the network has no device of this machine.
        if found and found[1] not in ("base", "cpu", "rpc") and (why := _unused(found[1], path)):
            lines.append(f"{found[1]}: {why}")
    packages = list(addons.installed())
    for module, path in packages:
        if module in addons.taken:
            continue
        if why := addons.fault(path, lib_dir()) or _unused(addons.PACKAGES[module], path):
            lines.append(f"{module.replace('_', '-')}: {why}")
    if not packages and not _registry("cuda") and (version := nvidia_driver()):
        package = f"edgekv-cuda{min(max(version, 12), 13)}"
        lines.append(
            f"cuda: there is an NVIDIA driver, and no backend for it: pip install {package}, or"
            " build with CMAKE_ARGS=-DGGML_CUDA=on"
        )
    return lines


def _registry(backend: str) -> int | None:
    """The address of a backend that ggml has loaded."""
    by_name = function("ggml", "ggml_backend_reg_by_name", c_void_p, c_char_p)
    return by_name(REGISTERED.get(backend, backend).encode())


def _unused(backend: str, path: Path) -> str:
    """Why the backend in the library `path` has no device here; empty if it has one."""
    registry = _registry(backend)
    if registry:
        count = function("ggml-base", "ggml_backend_reg_dev_count", c_size_t, c_void_p)
        return "" if count(registry) else "it found no device that it can use"
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return str(error)
    return "it does not start here"


def nvidia_driver() -> int | None:
    """The major version of CUDA that the NVIDIA driver of this machine has; None without one."""
    version = ctypes.c_int()
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        if driver.cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000
