"""Facts about the build and model files: for `edgekv info`, and to compute sizes from."""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from edgekv import native
from edgekv.base import machine
from edgekv.base.cache_types import CACHE_TYPES
from edgekv.errors import BadInput, EdgeKVError
from edgekv.library import lib_dir, logged_error, muted
from edgekv.model import backends, kind, metadata, placement
from edgekv.model.placement import Placement
from edgekv.native import llama_cpp
from edgekv.version import __version__


def _cache_types() -> dict[str, tuple[int, int, int]]:
    import gguf

    kinds = {n: gguf.GGMLQuantizationType[n.upper()] for n in CACHE_TYPES}
    return {n: (int(k), *gguf.GGML_QUANT_SIZES[k]) for n, k in kinds.items()}


cache_types = _cache_types()
"""name -> (ggml type, values per block, bytes per block)"""


def type_name(kind: int) -> str:
    """The name of a cache type from ggml's number; empty for one that no cache has."""
    return next((name for name, (number, _, _) in cache_types.items() if number == kind), "")


def devices() -> list[dict[str, Any]]:
    """The backends' devices: name, description, memory_total and memory_free in bytes; of main
    memory what a process can still get.
    """
    keys = ("name", "description", "memory_total", "memory_free")
    found = [{key: getattr(one, key) for key in keys} for one in backends.devices()]
    for device in found:
        if device["name"].upper() == "CPU":
            with suppress(EdgeKVError):  # the system does not say: ggml's numbers stay
                free, total = machine.memory_free(), machine.memory_total()
                device |= {"memory_free": free, "memory_total": total}
    return found


def is_offloaded(n_gpu_layers: int) -> bool:
    """Whether weights and cache of (some) layers go to another memory than the CPU's."""
    return bool(n_gpu_layers) and any(d.name.upper() != "CPU" for d in backends.devices())


def build_info() -> dict[str, Any]:
    """Versions, pin, patches of the loaded library, and the backends' devices (memory in bytes)."""
    import edgekv.llama_cpp as bindings

    path = lib_dir() / "build-info.json"
    built = json.loads(path.read_text()) if path.exists() else {}
    return {
        "edgekv": __version__,
        "llama_cpp_python": bindings.__version__,
        "llama_cpp_commit": built.get("commit", "unknown"),
        "patches": [x["name"] for x in built.get("patches", [])],
        "lib": str(lib_dir()),
        "instructions": instructions(),
        "devices": devices(),
        "passed_over": backends.passed_over(),
        "build": built,
    }


def instructions() -> list[str]:
    """Names of the processor's instruction sets that the loaded CPU kernels are compiled for."""
    llama_cpp.llama_backend_init()  # loads the backends
    text = llama_cpp.llama_print_system_info().decode(errors="replace")
    found = re.search(r"CPU : ([^:]*)", text)
    names = re.findall(r"(\w+) = 1", found[1]) if found else []
    return [x for x in names if x not in ("LLAMAFILE", "OPENMP", "REPACK")]


def model_info(path: str) -> dict[str, Any]:
    """Shape of a GGUF file and how edgekv reads it: mode 'layers' or 'uncompressed', with the
    reason in `note`. v_in_k: V is the beginning of K and takes no memory (latent attention).

    Raises BadInput if the file cannot be loaded. Weights are not read.
    """
    model = load_without_weights(path)
    try:
        return model_shape(model)
    finally:
        llama_cpp.llama_model_free(model)


def load_without_weights(
    path: str, n_gpu_layers: int = 0, placed: Sequence[Placement] = (), with_mtp: bool = False
) -> Any:
    """Return a llama_model of the file `path`: its shape and vocabulary, no weights. placed: where
    tensors would go; with_mtp: also its heads for further tokens.

    Raises BadInput if the file cannot be loaded.
    """
    check_gguf(path)
    params = llama_cpp.llama_model_default_params()
    params.no_alloc, params.load_mode = True, llama_cpp.LLAMA_LOAD_MODE_NONE
    params.n_gpu_layers, params.load_mtp = n_gpu_layers, with_mtp
    overrides = placement.as_array(placed)
    if overrides is not None:
        params.tensor_buft_overrides = ctypes.addressof(overrides)
    logged_error()  # an older one explains nothing
    with muted():
        model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise BadInput(f"{path} cannot be loaded as a model: {logged_error() or 'it is damaged'}")
    return model


def model_shape(model: Any) -> dict[str, Any]:
    meta = metadata.of_model(model)
    arch = meta.get("general.architecture", "unknown")
    n_head = llama_cpp.llama_model_n_head(model)
    d_default = llama_cpp.llama_model_n_embd(model) // max(n_head, 1)
    n_layer = llama_cpp.llama_model_n_layer(model)
    why = native.why_unsupported(model)
    return {
        "arch": arch,
        "n_layer": n_layer,
        "n_head": n_head,
        "n_head_kv": native.model_heads(model),
        "d_head_k": int(meta.get(f"{arch}.attention.key_length", d_default)),
        "d_head_v": int(meta.get(f"{arch}.attention.value_length", d_default)),
        "v_in_k": int(meta.get(f"{arch}.attention.key_length_mla", 0)) > 0,
        "n_ctx_train": llama_cpp.llama_model_n_ctx_train(model),
        "n_params": llama_cpp.llama_model_n_params(model),
        "size_bytes": llama_cpp.llama_model_size(model),
        "mode": "uncompressed" if why else "layers",
        "note": why or "",
    }


def check_gguf(path: str, vocab_only: bool = False) -> None:
    """Raises BadInput, in one line that says what to do, unless `path` is a readable file that
    begins like a GGUF, or if it is one of another kind, such as an adapter. vocab_only: a
    vocabulary will do.
    """
    if os.path.isdir(path):
        raise BadInput(f"{path} is a folder; name the .gguf file in it")
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        raise BadInput(f"{path} is no regular file; name a .gguf file")
    try:
        with open(path, "rb") as f:
            magic = f.read(4)
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); name a .gguf file") from None
    if magic != b"GGUF":
        raise BadInput(
            f"{path} is no GGUF file; convert the model with llama.cpp or download its .gguf"
        )
    kind.check(path, vocab_only=vocab_only)
