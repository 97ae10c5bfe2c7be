"""The native library's functions and structures as ctypes has them, and its errors as exceptions
(native/include/edgekv.h has the contracts).
"""

from __future__ import annotations

from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_void_p,
)
from dataclasses import fields
from pathlib import Path
from typing import Any

from edgekv.errors import BadInput, Cancelled, EdgeKVError, Unsupported
from edgekv.library import lib_dir
from edgekv.native.infos import LayerInfo, MemoryInfo

ABI = 26
CANCELLED, INVALID, UNSUPPORTED, NO_MEMORY = -1, -2, -3, -4


def _load() -> Any:
    """The bindings' functions on our library."""
    try:
        from edgekv.llama_cpp import llama_cpp as bindings
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("edgekv."):
            raise  # a package that the bindings need
        raise EdgeKVError(
            f"edgekv is not built here: build and install it with 'pip install .'{_or_call()}"
        ) from None
    if not hasattr(bindings._lib, "edgekv_abi") or bindings._lib.edgekv_abi() != ABI:
        raise EdgeKVError(
            f"the library in {lib_dir()} is of another edgekv version: build and install again, or"
            " start Python in another folder"
        )
    return bindings


def _or_call() -> str:
    """The Python that `cli.py` has installed a checkout into, if this is one's."""
    folder = Path(__file__).parents[2] / ".venv"
    found = [one for one in (folder / "bin/python", folder / "Scripts/python.exe") if one.exists()]
    return f", or call {found[0]}" if found else ""


llama_cpp = _load()
lib = llama_cpp._lib


class CObserver(Structure):
    _fields_ = [("begin", c_int32), ("end", c_int32), ("stats", c_uint32), ("every", c_int32)]


class CLayerInfo(Structure):
    _fields_ = [(x.name, c_int32) for x in fields(LayerInfo)]


class CMemoryInfo(Structure):
    _fields_ = [(x.name, c_int64) for x in fields(MemoryInfo)]


class CArchiveInfo(Structure):
    _fields_ = [
        (n, c_int64) for n in ("n_tokens", "n_known", "n_judged", "n_bytes", "n_bytes_memory")
    ]


class CContextBytes(Structure):
    _fields_ = [("cache", c_int64), ("compute", c_int64)]


CProgress = CFUNCTYPE(c_bool, c_int32, c_int32, c_void_p)


class CPrefillParams(Structure):
    _fields_ = [
        ("tokens", POINTER(c_int32)),
        ("n_tokens", c_int32),
        ("logits", POINTER(c_float)),
        ("pieces", POINTER(c_int32)),
        ("n_pieces", c_int32),
        ("observers", POINTER(CObserver)),
        ("n_observers", c_int32),
        ("hidden", c_int),
        ("dir", c_char_p),
        ("most_work", c_int64),
        ("progress", CProgress),
        ("data", c_void_p),
    ]


I32P, F32P = POINTER(c_int32), POINTER(c_float)


class CMerge(Structure):
    _fields_ = [
        ("n", c_int32),
        ("rows", I32P),
        ("own", F32P),
        ("counts", I32P),
        ("sources", I32P),
        ("weights", F32P),
    ]


class CLost(Structure):
    _fields_ = [
        *((n, F32P) for n in ("keys", "values", "kept", "kept_values", "queries")),
        *((n, c_int32) for n in ("n", "n_kept", "n_queries", "d_k", "d_v")),
        ("each", c_float),
        ("each_kept", c_float),
    ]


class CCentroidParams(Structure):
    _fields_ = [
        ("n_groups", c_int32),
        ("rounds", c_int32),
        *((n, c_float) for n in ("jitter", "ridge", "worst", "longest", "fit")),
        ("n_threads", c_int32),
    ]


P, I32 = c_void_p, c_int32
FUNCTIONS: tuple[tuple[Any, ...], ...] = (
    ("last_error", c_char_p),
    ("last_status", c_int),
    ("is_set", c_bool, P),
    ("trim_heap", None),
    ("next_context", None, c_bool),
    ("why_unsupported", c_char_p, P),
    ("why_no_heads", c_char_p, P),
    ("keep_hidden", None, P, c_bool, I32),
    ("hidden_ith", F32P, P, I32),
    ("model_n_head_kv", I32, P, I32),
    ("model_hidden_width", I32, P),
    ("model_product_bytes", c_int64, P, c_int64, c_bool),
    ("model_rows_alike", c_bool, P),
    ("has_store", c_bool, P),
    ("check_finite", c_int, P),
    ("context_bytes_get", c_int, P, POINTER(CContextBytes)),
    ("device_free", c_int64, P),
    ("n_layer", I32, P),
    ("layer_get", c_int, P, I32, POINTER(CLayerInfo)),
    ("len", c_int, P, I32, I32P),
    ("pos", c_int, P, I32, I32, I32P),
    ("rows_f32", c_int, P, I32, I32, F32P, F32P),
    ("rows_bytes", c_int, P, I32, I32, P, P),
    ("memory_get", c_int, P, POINTER(CMemoryInfo)),
    ("mark_tokens", c_int, P),
    ("keep_state", c_int, P),
    ("round_rows", c_int, P),
    ("archive_on", c_int, P, c_char_p, c_float, c_int),
    ("archive_take", c_void_p, P),
    ("archive_lost", c_char_p, P),
    ("archive_new", c_void_p, P, POINTER(CArchiveInfo)),
    ("archive_get", c_int, P, POINTER(CArchiveInfo)),
    ("archive_piece_bytes", c_int64, P, I32),
    ("archive_piece_get", c_int, P, I32, P),
    ("archive_piece_put", c_int, P, I32, P),
    ("archive_index", c_int, P, P, c_int64),
    ("archive_put", c_int, P, P, c_bool),
    ("archive_free", None, P),
    ("evict", c_int, P, I32, I32P, I32P),
    ("write_rows", c_int, P, I32, I32, I32, I32P, F32P, F32P),
    ("make_plain", c_int, P),
    ("trim_capacity", c_int, P),
    ("parked_new", c_void_p, P),
    ("parked_swap", c_int, P, P),
    ("step_several", c_int, P, c_int32, POINTER(c_void_p), I32P),
    ("parked_bytes", c_int64, P),
    ("parked_archive_bytes", c_int64, P),
    ("parked_free", None, P),
    ("prefill_begin", c_void_p, P, POINTER(CPrefillParams)),
    ("prefill_by_layer", c_bool, P),
    ("prefill_score_ms", c_double, P),
    ("prefill_work", c_int, P, POINTER(c_double)),
    ("product_peak", c_double, c_bool),
    ("prefill_run", c_int, P, I32),
    ("prefill_old", c_int, P, I32, I32P),
    ("prefill_stat", c_int, P, I32, c_int, F32P),
    ("prefill_rows", c_int, P, I32, F32P, F32P),
    ("prefill_some_rows", c_int, P, I32, I32, I32P, F32P, F32P),
    ("prefill_predict", c_int, P, I32, F32P, I32, c_bool, I32, I32, F32P, F32P),
    ("prefill_queries", c_int, P, I32, I32, F32P, F32P),
    ("prefill_drop_queries", c_int, P, I32),
    ("prefill_rotation", c_int, P, I32, F32P),
    ("prefill_keep", c_int, P, I32P, I32P),
    ("prefill_shrink", c_int, P, I32, I32P),
    ("prefill_hidden", I32, P, F32P),
    ("prefill_end", c_int, P),
    ("prefill_pause", c_int, P),
    ("prefill_resume", c_int, P),
    ("prefill_free", None, P),
    ("prefill_nearest", c_int, P, I32, I32, I32, I32P, I32, I32P, F32P, I32P),
    ("prefill_merge", c_int, P, I32, I32, POINTER(CMerge)),
    ("centroids", c_int, POINTER(CLost), POINTER(CCentroidParams), F32P, F32P, P, I32P),
)
"""Name, result and arguments of every function that is called here."""

for _name, _result, *_arguments in FUNCTIONS:
    _function = getattr(lib, "edgekv_" + _name)
    _function.restype, _function.argtypes = _result, _arguments


def error_of(status: int) -> EdgeKVError:
    text = (lib.edgekv_last_error() or b"").decode(errors="replace") or "the native library failed"
    kind = {CANCELLED: Cancelled, INVALID: BadInput, UNSUPPORTED: Unsupported}.get(
        status, EdgeKVError
    )
    return kind(text)


def check(status: int) -> None:
    if status != 0:
        raise error_of(status)


def i32(x: Any) -> Any:
    return x.ctypes.data_as(I32P)


def f32(x: Any) -> Any:
    return None if x is None else x.ctypes.data_as(F32P)
