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


class _Array:
    """An argument that is an array: of numpy's, or what ctypes takes by itself."""

    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer

    def from_param(self, given: Any) -> Any:
        # numpy is not imported here: where nothing is installed, the library's absence is said
        return given.ctypes.data_as(self._pointer) if hasattr(given, "ctypes") else given


class Status(c_int):
    """A result that is 0, or says what went wrong."""


P, I32 = c_void_p, c_int32
I32S, F32S = _Array(I32P), _Array(F32P)
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
    ("check_finite", Status, P),
    ("context_bytes_get", Status, P, POINTER(CContextBytes)),
    ("device_free", c_int64, P),
    ("n_layer", I32, P),
    ("layer_get", Status, P, I32, POINTER(CLayerInfo)),
    ("len", Status, P, I32, I32S),
    ("pos", Status, P, I32, I32, I32S),
    ("rows_f32", Status, P, I32, I32, F32S, F32S),
    ("rows_bytes", Status, P, I32, I32, P, P),
    ("memory_get", Status, P, POINTER(CMemoryInfo)),
    ("mark_tokens", Status, P),
    ("keep_state", Status, P),
    ("round_rows", Status, P),
    ("archive_on", Status, P, c_char_p, c_float, c_int),
    ("archive_take", c_void_p, P),
    ("archive_lost", c_char_p, P),
    ("archive_new", c_void_p, P, POINTER(CArchiveInfo)),
    ("archive_get", Status, P, POINTER(CArchiveInfo)),
    ("archive_piece_bytes", c_int64, P, I32),
    ("archive_piece_get", Status, P, I32, P),
    ("archive_piece_put", Status, P, I32, P),
    ("archive_index", Status, P, P, c_int64),
    ("archive_put", Status, P, P, c_bool),
    ("archive_free", None, P),
    ("evict", Status, P, I32, I32S, I32S),
    ("write_rows", Status, P, I32, I32, I32, I32S, F32S, F32S),
    ("make_plain", Status, P),
    ("trim_capacity", Status, P),
    ("parked_new", c_void_p, P),
    ("parked_swap", Status, P, P),
    ("step_several", Status, P, c_int32, POINTER(c_void_p), I32S),
    ("parked_bytes", c_int64, P),
    ("parked_archive_bytes", c_int64, P),
    ("parked_free", None, P),
    ("prefill_begin", c_void_p, P, POINTER(CPrefillParams)),
    ("prefill_by_layer", c_bool, P),
    ("prefill_score_ms", c_double, P),
    ("prefill_work", Status, P, POINTER(c_double)),
    ("product_peak", c_double, c_bool),
    ("prefill_run", Status, P, I32),
    ("prefill_old", Status, P, I32, I32S),
    ("prefill_stat", Status, P, I32, c_int, F32S),
    ("prefill_rows", Status, P, I32, F32S, F32S),
    ("prefill_some_rows", Status, P, I32, I32, I32S, F32S, F32S),
    ("prefill_predict", Status, P, I32, F32S, I32, c_bool, I32, I32, F32S, F32S),
    ("prefill_queries", Status, P, I32, I32, F32S, F32S),
    ("prefill_drop_queries", Status, P, I32),
    ("prefill_rotation", Status, P, I32, F32S),
    ("prefill_keep", Status, P, I32S, I32S),
    ("prefill_shrink", Status, P, I32, I32S),
    ("prefill_hidden", I32, P, F32S),
    ("prefill_end", Status, P),
    ("prefill_pause", Status, P),
    ("prefill_resume", Status, P),
    ("prefill_free", None, P),
    ("prefill_nearest", Status, P, I32, I32, I32, I32S, I32, I32S, F32S, I32S),
    ("prefill_merge", Status, P, I32, I32, POINTER(CMerge)),
    ("centroids", Status, POINTER(CLost), POINTER(CCentroidParams), F32S, F32S, P, I32S),
)
"""Name, result and arguments of every function that is called here."""
NEW = ("archive_new", "parked_new", "prefill_begin")
"""Those whose result is no object where they fail."""


def _error(status: int) -> EdgeKVError:
    text = (lib.edgekv_last_error() or b"").decode(errors="replace") or "the native library failed"
    kinds = {CANCELLED: Cancelled, INVALID: BadInput, UNSUPPORTED: Unsupported}
    return kinds.get(status, EdgeKVError)(text)


def _check(status: Status, *_: Any) -> None:
    if status.value != 0:
        raise _error(status.value)


def _check_new(handle: int | None, *_: Any) -> int:
    if not handle:
        raise _error(lib.edgekv_last_status())
    return handle


for _name, _result, *_arguments in FUNCTIONS:
    _function = getattr(lib, "edgekv_" + _name)
    _function.restype, _function.argtypes = _result, _arguments
    if _name in NEW:
        _function.errcheck = _check_new
    elif _result is Status:
        _function.errcheck = _check


def i32(x: Any) -> Any:
    return x.ctypes.data_as(I32P)


def f32(x: Any) -> Any:
    return None if x is None else x.ctypes.data_as(F32P)
