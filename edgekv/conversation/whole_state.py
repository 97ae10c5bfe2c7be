"""llama.cpp's state of a sequence in its own cache, looked at before llama.cpp gets it.

llama.cpp empties the cache before it reads, takes positions for what they say, and keeps numbers
that are none in rows that no later conversation clears. The store's states are checked where they
are read, `native/src/store/edgekv-store.cpp`. A state as `llama_kv_cache::state_write` writes it,
for each of one or two caches:

    streams (1), cells; per cell: position, sequences (1), [3 numbers,] sequence
    transposed, layers; per layer: type, bytes of a row, the rows of K; the same of V
    (transposed: type, bytes of a value, values of a row, and the values of all rows);
    V is left out where it is part of K (latent attention)

Recurrent layers stand behind these caches, or alone:

    cells (1, or 0 in an empty conversation); position, sequences (0)
    transposed (0), layers; twice per layer that has a state: type, bytes of a row, the row
"""

from __future__ import annotations

import struct
from itertools import chain, repeat
from typing import Any

import numpy as np

from edgekv import native
from edgekv.base.cache_types import SCALES
from edgekv.model import facts
from edgekv.native import llama_cpp

_PIECE = 1 << 18  # bytes that are looked at together


def check(model: Any, data: memoryview, n_tokens: int) -> None:
    """Raises ValueError unless `data` is a state of `n_tokens` tokens that holds numbers only.

    model: a llama_model. Caches of other kinds (with an indexer, ...) are not looked into.
    """
    is_recurrent = llama_cpp.llama_model_is_recurrent(model)
    is_hybrid = llama_cpp.llama_model_is_hybrid(model)
    if native.why_unsupported(model) and not is_recurrent:
        return
    has_v = not facts.model_shape(model)["v_in_k"]
    several = llama_cpp.llama_model_rope_type(model) in (
        llama_cpp.LLAMA_ROPE_TYPE_MROPE,
        llama_cpp.LLAMA_ROPE_TYPE_IMROPE,
    )
    state = _State(data)
    # a magic number, which llama.cpp looks at, and a sequence, which it does not
    state.numbers("2I")
    if not is_recurrent:
        _check_cache(state, n_tokens, several, has_v, n_tokens)
        if llama_cpp.llama_model_n_swa(model) if is_hybrid else state.left:
            _check_cache(state, n_tokens, several, has_v, None)  # the sliding-window layers'
    if is_recurrent or is_hybrid:
        _check_recurrent(state, n_tokens)
    if state.left:
        raise ValueError("something stands behind its end")


class _State:
    """Reads a state from its beginning. Raises ValueError at its end."""

    def __init__(self, data: memoryview) -> None:
        self.left = data

    def take(self, n_bytes: int) -> memoryview:
        if n_bytes > len(self.left):
            raise ValueError("it ends too early")
        taken, self.left = self.left[:n_bytes], self.left[n_bytes:]
        return taken

    def numbers(self, form: str) -> tuple[int, ...]:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))


def _check_cache(
    state: _State, n_tokens: int, several: bool, has_v: bool, n_expected: int | None
) -> None:
    """several: cells have more positions than one; n_expected: cells there must be, None: any."""
    n_streams, n_cells = state.numbers("2I")
    if n_streams != 1 or n_cells > n_tokens or n_expected not in (None, n_cells):
        raise ValueError("it is not of as many tokens")
    if n_cells == 0:
        if n_tokens:
            raise ValueError("it holds no tokens")
        return
    more = [("more", "<i4", 3)] if several else []
    cell = np.dtype([("pos", "<i4"), ("n_seq", "<u4"), *more, ("seq", "<i4")])
    cells = np.frombuffer(state.take(cell.itemsize * n_cells), cell)
    pos = np.sort(cells["pos"])
    if (
        (cells["n_seq"] != 1).any()
        or pos[0] < 0
        or pos[-1] != n_tokens - 1
        or (np.diff(pos) == 0).any()
    ):
        raise ValueError("its positions are not those of its tokens")
    transposed, n_layers = state.numbers("2I")
    for is_transposed in chain(repeat(0, n_layers), repeat(transposed, n_layers * has_v)):
        _check_rows(state, is_transposed, n_cells)


def _check_recurrent(state: _State, n_tokens: int) -> None:
    (n_cells,) = state.numbers("I")
    if n_cells != min(n_tokens, 1):
        raise ValueError("it is not of as many tokens")
    if n_cells and state.numbers("iI") != (n_tokens - 1, 0):
        raise ValueError("its positions are not those of its tokens")
    transposed, _ = state.numbers("2I")
    while state.left:
        _check_rows(state, transposed, n_cells)


def _check_rows(state: _State, is_transposed: int, n_rows: int) -> None:
    if is_transposed:
        kind, size, n_values = state.numbers("iII")
    else:
        (kind, size), n_values = state.numbers("iQ"), 1
    if not _finite(kind, state.take(size * n_values * n_rows)):
        raise ValueError("it holds values that are no numbers")


def _finite(kind: int, rows: memoryview) -> bool:
    """Whether rows of a ggml type hold numbers only."""
    names = {number: (name, n_bytes) for name, (number, _, n_bytes) in facts.cache_types.items()}
    name, n_bytes = names.get(kind, ("f32", 4))
    if len(rows) % n_bytes:
        raise ValueError("its rows are of another size")
    step = _PIECE // n_bytes * n_bytes
    return all(_finite_piece(name, n_bytes, rows[i : i + step]) for i in range(0, len(rows), step))


def _finite_piece(name: str, n_bytes: int, rows: memoryview) -> bool:
    if name == "f32":
        return bool(np.isfinite(np.frombuffer(rows, "<f4")).all())
    words = np.frombuffer(rows, "<u2").reshape(-1, n_bytes // 2)[:, : SCALES[name] or 1]
    exponent = 0x7F80 if name == "bf16" else 0x7C00
    return not bool(((words & exponent) == exponent).any())
