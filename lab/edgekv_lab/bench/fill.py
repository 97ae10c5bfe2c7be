"""Fill: a cache of any depth without reading it, the rows of a text's first 512 tokens again and
again at positions that go on.

How fast a token is written depends on how many rows there are, of which type, in which heads; not
on their values. The rows come from the state that llama.cpp saves of a sequence, are repeated
there, and go back as a state of the wanted length.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv import native
from edgekv.conversation import state
from edgekv.errors import BadInput
from edgekv.memory.footprint import row_bytes
from edgekv.methods.budget import Fixed
from edgekv_lab.bench.spec import FILL_FIRST

_WORD = 4
_HEAD = 2 * _WORD  # llama.cpp's magic number and the sequence
_CELL = 3 * _WORD  # position, number of sequences, the sequence
Block = NDArray[np.uint8]


def fill(llm: Any, tokens: list[int], depth: int) -> None:
    """Make `depth` tokens the conversation of `llm`, which has none yet. tokens: FILL_FIRST of
    them, which are read.

    A compressed cache holds the rows that its budget gives each head for that depth. Raises
    BadInput for a cache of another kind than one row for each token and layer, and for V that lies
    the other way round (without flash attention).
    """
    llm.eval(tokens)
    old = np.frombuffer(state.take(llm).data, np.uint8)
    new = _repeat_whole(old, depth) if llm.engine is None else _repeat_store(old, llm, depth)
    data = (ctypes.c_uint8 * len(new)).from_buffer(new)
    if not state.put(llm, state.State(np.resize(np.asarray(tokens, np.int32), depth), data, None)):
        raise _cannot("llama.cpp does not take its state back")


def _cannot(why: str) -> BadInput:
    return BadInput(
        f"this cache cannot be filled ({why}): leave --fill repeat out, and depths are read"
    )


class _Reader:
    """What is left of a saved state."""

    def __init__(self, data: Block) -> None:
        self.data = data

    def take(self, n_bytes: int) -> Block:
        if n_bytes < 0 or n_bytes > len(self.data):
            raise _cannot("its saved state is of another kind")
        taken, self.data = self.data[:n_bytes], self.data[n_bytes:]
        return taken

    def number(self, kind: type = np.uint32) -> int:
        return int(self.take(np.dtype(kind).itemsize).view(kind)[0])


def _repeat_whole(old: Block, depth: int) -> bytearray:
    """llama.cpp's own cache: one stream; each cell's position and sequence; K of each layer, a row
    per cell; V likewise.

    Source: llama_kv_cache::state_write in llama.cpp 0c1e57098.
    """
    reader, new = _Reader(old), bytearray()
    new += reader.take(_HEAD + _WORD).tobytes()
    n = reader.number()
    new += np.uint32(depth).tobytes()
    cells = np.resize(reader.take(n * _CELL).view(np.uint32).reshape(n, 3), (depth, 3))
    if (
        n != FILL_FIRST
        or (cells[:n] != np.column_stack([np.arange(n), np.ones(n), np.zeros(n)])).any()
    ):
        raise _cannot("its cells hold more than a position")
    cells[:, 0] = np.arange(depth)
    new += cells.tobytes()
    if reader.number():
        raise _cannot("V lies the other way round without flash attention")
    n_layer = reader.number()
    new += np.array([0, n_layer], np.uint32).tobytes()
    for _ in range(2 * n_layer):
        kind, size = reader.take(_WORD), reader.take(2 * _WORD)
        new += kind.tobytes()
        new += size.tobytes()
        n_bytes = int(size.view(np.uint64)[0])
        new += _rows(reader.take(n * n_bytes), n_bytes, depth)
    if len(reader.data):
        raise _cannot("it consists of more than one")
    return new


def _repeat_store(old: Block, llm: Any, depth: int) -> bytearray:
    """edgekv's store: sizes; for each layer and head its length, the rows' positions, K, V
    (`edgekv_store::write`).
    """
    store, reader, new = llm.engine.store, _Reader(old), bytearray()
    if any(layer.n_swa for layer in store.layers):
        raise _cannot("some layers have a sliding window")
    native.clear(llm.ctx)
    # a budget that waits for scores spreads rows as those of the last prompt were
    spending = llm.engine.start(llm.engine.plan(depth), recent=True)
    assert isinstance(spending, Fixed)
    new += reader.take(_HEAD + 2 * _WORD).tobytes()
    reader.take(2 * _WORD)
    new += np.array([depth, depth], np.int32).tobytes()  # tokens seen, all of them compressed
    for il, layer in enumerate(store.layers):
        new += reader.take(5 * _WORD).tobytes()  # heads, types, sizes
        for n_rows in spending.counts[il, : layer.n_head_kv]:
            n = reader.number()
            reader.take(n * _WORD)
            new += np.int32(n_rows).tobytes()
            new += np.arange(n_rows, dtype=np.int32).tobytes()
            for kind, d in layer.stored:
                n_bytes = row_bytes(kind, d)
                new += _rows(reader.take(n * n_bytes), n_bytes, int(n_rows))
    return new


def _rows(rows: Block, n_bytes: int, n: int) -> bytes:
    """n rows, those that are there again and again."""
    return np.resize(rows.reshape(-1, n_bytes), (n, n_bytes)).tobytes()
