"""Contexts of llama.cpp: with a store or without one, what they take, and why one cannot be had."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekv.native.bindings import CContextBytes, lib, llama_cpp

OUTPUTS = 32
"""Tokens of one step whose logits a compressed context can give."""


@contextmanager
def next_context(on: bool) -> Iterator[None]:
    """A `with` block in which contexts that this thread creates get a ragged store, if `on`."""
    lib.edgekv_next_context(on)
    try:
        yield
    finally:
        lib.edgekv_next_context(False)


def context_error() -> str:
    """Why a context of a `next_context` block could not be created, one line; empty if
    llama.cpp itself refused it.

    After a `llama_decode` that failed: why it did.
    """
    return (lib.edgekv_last_error() or b"").decode(errors="replace")


def take_back(ctx: Any, n_tokens: int) -> bool:
    """Take a context's cache back to its first n_tokens. False, and as before, if it cannot."""
    return bool(llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(ctx), 0, n_tokens, -1))


def clear(ctx: Any) -> None:
    """Empty the cache of a llama_context, its rows included."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)


def logits(ctx: Any, n_vocab: int, index: int = -1) -> NDArray[np.float32] | None:
    """float32 [n_vocab]: a llama_context's logits of a token of its last step, usually of the last
    one; they change with the next step. None where it has none.
    """
    found = llama_cpp.llama_get_logits_ith(ctx, index)
    return np.ctypeslib.as_array(found, (n_vocab,)) if found else None


def trim_heap() -> None:
    """Give memory that was freed back to the system."""
    lib.edgekv_trim_heap()


def context_bytes(ctx: Any) -> tuple[int, int]:
    """Bytes of a llama_context on all devices: its cache (llama.cpp's own, or the store) and
    compute buffers; without weights (no_alloc) what they would be.
    """
    bytes_ = CContextBytes()
    lib.edgekv_context_bytes_get(ctx, bytes_)
    return bytes_.cache, bytes_.compute


def device_free(ctx: Any) -> int:
    """Bytes free on the device that has the entries of all layers; 0 where there is no such one."""
    return int(lib.edgekv_device_free(ctx))


def why_unsupported(model: Any) -> str | None:
    """Why this llama_model keeps llama.cpp's own cache, one line; None if it need not."""
    why = lib.edgekv_why_unsupported(model)
    return why.decode() if why else None


def model_heads(model: Any) -> list[int]:
    """[n_layer] KV heads of a llama_model whose entries are cached; 0 where a layer has none."""
    n_layer = llama_cpp.llama_model_n_layer(model)
    return [lib.edgekv_model_n_head_kv(model, il) for il in range(n_layer)]


def hidden_width(model: Any) -> int:
    """Values of a token between two layers of a llama_model: n_embd, or several (Gemma 3n)."""
    return int(lib.edgekv_model_hidden_width(model))


def product_peak(levels: bool) -> float:
    """Multiply-adds that a thread can do in a second as products with quantised weights are made
    while a prompt is read, with everything in the nearest cache: in 8 bits (levels), or as the
    others and attention's. Takes some 20 ms.
    """
    return float(lib.edgekv_product_peak(levels))


class ProductBytes(NamedTuple):
    """What products with quantised weights work with. words: without it they are llama.cpp's;
    weights: what they keep of a layer's from chunk to chunk, where there is room for it.
    """

    words: int = 0
    weights: int = 0


def product_bytes(model: Any, n_chunk: int, again: bool, most: int | None = None) -> ProductBytes:
    """Bytes that products with a llama_model's quantised weights work with on the CPU while a
    prompt is read in chunks of up to n_chunk tokens; again: several of them meet the same weights;
    most: what the user lets them take of both, None: nothing was said.
    """
    words, both = (
        int(lib.edgekv_model_product_bytes(model, n_chunk, meets)) for meets in (False, again)
    )
    return ProductBytes(words, both - words) if most is None else ProductBytes(min(both, most))


def rows_alike(model: Any) -> bool:
    """Whether a step with tokens of several conversations gives each the logits of a step of its
    own, as far as products with the weights of a llama_model go.
    """
    return bool(lib.edgekv_model_rows_alike(model))


def stop_if_set(ctx: Any, flag: ctypes.c_bool) -> None:
    """Let steps of a llama_context end, between two of their operations, once the flag is set. It
    must live as long as the context."""
    callback = ctypes.cast(lib.edgekv_is_set, llama_cpp.ggml_abort_callback)
    llama_cpp.llama_set_abort_callback(ctx, callback, ctypes.addressof(flag))


def check_finite(ctx: Any) -> None:
    """Raise BadInput if llama.cpp's own cache in this context holds values that are no numbers."""
    lib.edgekv_check_finite(ctx)
