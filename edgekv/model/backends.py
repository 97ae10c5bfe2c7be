"""The devices of ggml's backends, by functions of ggml that the bindings leave out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_size_t, c_void_p
from functools import cache
from typing import Any, NamedTuple

from edgekv.library import library_path
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
