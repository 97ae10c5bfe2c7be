"""Tiny models with quantised weights, as llama.cpp makes them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import edgekv.llama_cpp as llama_cpp

Q8_0 = 7
"""llama_ftype."""


def quantize(source: Path, path: Path, ftype: int = Q8_0) -> Path:
    """Write a model with weights of this llama_ftype to `path`."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = ftype, True, 1
    names = str(source).encode(), str(path).encode()
    assert llama_cpp.llama_model_quantize(*names, ctypes.byref(params)) == 0
    return path
