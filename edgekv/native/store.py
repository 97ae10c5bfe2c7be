"""The ragged store of a context."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.native.bindings import CLayerInfo, CMemoryInfo, check, f32, i32, lib


@dataclass(frozen=True)
class LayerInfo:
    """Shape of one layer's cache; `bytes_row` is one K row and one V row of one KV head, with ALiBi
    a float more. A layer without attention has no KV head.
    """

    n_head: int
    n_head_kv: int
    d_k: int
    d_v: int
    type_k: int
    type_v: int
    n_swa: int
    bytes_row: int
    reads: int = -1
    """The layer whose K and V it attends to, where layers share them; -1: not said, its own."""
    v_in_k: int = 0
    """1: V is the first d_v values of K (latent attention), and takes no bytes of its own."""
    has_basis: int = field(default=0, compare=False)
    """1: keys are scaled, and the mean of their bias is taken from them, before they are stored in
    a quantised type, which changes no softmax. `Store.rows` gives whole keys.
    """
    rounds_late: int = field(default=0, compare=False)
    """1: rows are f16 until they have to be rounded to the cache's types: while a prompt is read,
    and the newest behind it (`edgekv.memory.limit.RECENT`).
    """

    @property
    def selects(self) -> bool:
        """Whether entries of the layer are chosen: it attends, and to everything."""
        return self.n_head_kv > 0 and self.n_swa == 0

    @property
    def waits(self) -> bool:
        """Whether new entries wait in f16 before they are rounded. Those of windows do not."""
        return bool(self.rounds_late) and self.selects

    @property
    def stored(self) -> list[tuple[int, int]]:
        """Type and number of values of what is stored of an entry: of K, and of V if it is no part
        of K.
        """
        k, v = (self.type_k, self.d_k), (self.type_v, self.d_v)
        return [k] if self.v_in_k else [k, v]


@dataclass(frozen=True)
class MemoryInfo:
    """What the store holds, and what it takes.

    n_past: tokens that went in; boundary: where the recent buffer begins; bytes of the store now
    and at the peak; bytes of recurrent layers' state and of the copy that `Store.mark` made of it,
    and tokens in the copy (-1: there is none); of the archive its bytes, whether prompts are read
    behind it, whether the conversation can go back to any token, and whether it did; tokens that
    the next step may have so that rows are rounded behind the same ones as by steps of one; bytes
    that tokens looked up in the archive. See edgekv.h.
    """

    n_past: int
    boundary: int
    bytes_now: int
    bytes_peak: int
    bytes_recurrent: int
    bytes_mark: int
    n_mark: int
    bytes_archive: int = 0
    bytes_index: int = 0
    has_archive: int = 0
    can_go_back: int = 0
    went_back: int = 0
    n_alike: int = 0
    bytes_recalled: int = 0

    @property
    def fixed(self) -> int:
        """Tokens that cannot be taken back one by one."""
        return 0 if self.goes_anywhere else self.exact

    @property
    def goes_anywhere(self) -> bool:
        """Whether the conversation can go back to any token, by its archive."""
        return bool(self.can_go_back) and not self.bytes_recurrent

    @property
    def exact(self) -> int:
        """Tokens behind which the cache can be what it was there, row for row: further back an
        archive has other rows in memory.
        """
        return self.n_past if self.bytes_recurrent else self.boundary


class Store:
    """The ragged store of a llama_context."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        self.layers = [self._layer(il) for il in range(lib.edgekv_n_layer(ctx))]
        self.n_head_kv = max(x.n_head_kv for x in self.layers)

    @staticmethod
    def of(ctx: Any) -> Store | None:
        """The store of a context, None if it has llama.cpp's own cache."""
        return Store(ctx) if lib.edgekv_has_store(ctx) else None

    def _layer(self, il: int) -> LayerInfo:
        info = CLayerInfo()
        check(lib.edgekv_layer_get(self.ctx, il, info))
        return LayerInfo(*(getattr(info, n) for n, *_ in CLayerInfo._fields_))

    @property
    def plain(self) -> bool:
        """Whether rows are stored as llama.cpp's cache stores them: whole keys, rounded at once."""
        return not any(layer.has_basis or layer.rounds_late for layer in self.layers)

    def make_plain(self) -> None:
        """See `plain`. Raises EdgeKVError unless the store is empty."""
        check(lib.edgekv_make_plain(self.ctx))
        self.layers = [self._layer(il) for il in range(len(self.layers))]

    def memory(self) -> MemoryInfo:
        info = CMemoryInfo()
        check(lib.edgekv_memory_get(self.ctx, info))
        return MemoryInfo(*(getattr(info, n) for n, *_ in CMemoryInfo._fields_))

    def mark(self) -> None:
        """Let the tokens that come be taken back, all at once, until the conversation is
        compressed.

        For a model with recurrent layers, of whose state a copy is made; others need none.
        """
        check(lib.edgekv_mark_tokens(self.ctx))

    def keep_state(self) -> None:
        """Let `take_back` go to where the conversation is now, whatever comes behind it, until it
        changes places or is compressed. For a model with recurrent layers, as `mark`, which stays.
        """
        check(lib.edgekv_keep_state(self.ctx))

    def round_rows(self) -> None:
        """Round what waits in f16, so that tokens that come see the same rows, however many more
        come before the conversation is taken back to where it is.
        """
        check(lib.edgekv_round_rows(self.ctx))

    def archive(self, folder: str, recall: float = 0.0, index_bits: int = 64) -> None:
        """Give conversations that begin from now on an archive in a file without a name in
        `folder`: see `edgekv_archive_on` in edgekv.h.

        Raises Unsupported for a model that has none, EdgeKVError if there can be no such file.
        """
        check(lib.edgekv_archive_on(self.ctx, folder.encode(), recall, index_bits))

    def why_no_archive(self) -> str:
        """Why the conversation has no archive any more; empty if it has one, or never had."""
        return str(lib.edgekv_archive_lost(self.ctx).decode(errors="replace"))

    def length(self, il: int) -> NDArray[np.int32]:
        """int32 [n_head_kv]: rows that attention reads."""
        out = np.empty(self.layers[il].n_head_kv, np.int32)
        check(lib.edgekv_len(self.ctx, il, i32(out)))
        return out

    def positions(self, il: int, head: int) -> NDArray[np.int32]:
        """int32 [rows]: the token index of each row, in the order of the store."""
        out = np.empty(self.length(il)[head], np.int32)
        check(lib.edgekv_pos(self.ctx, il, head, i32(out)))
        return out

    def rows(
        self, il: int, head: int, some: NDArray[np.int32] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """K [rows, d_k] and V [rows, d_v] of one head as float32; or of `some` of its rows."""
        n, info = int(self.length(il)[head]), self.layers[il]
        k, v = np.empty((n, info.d_k), np.float32), np.empty((n, info.d_v), np.float32)
        check(lib.edgekv_rows_f32(self.ctx, il, head, f32(k), f32(v)))
        return (k, v) if some is None else (k[some], v[some])

    def row_bytes(self, il: int, head: int) -> tuple[bytes, bytes]:
        """K and V of one head as they are stored; no bytes of a V that is part of K."""
        import gguf

        n, info = int(self.length(il)[head]), self.layers[il]
        buffers = []
        for kind, d in info.stored:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
            buffers.append(ctypes.create_string_buffer(max(n * d // block * size, 1)))
        k, v = [*buffers, None][:2]
        check(lib.edgekv_rows_bytes(self.ctx, il, head, k, v))
        return tuple(b.raw if b and n else b"" for b in (k, v))  # type: ignore[return-value]

    def evict(self, il: int, keep: list[NDArray[np.int32]]) -> None:
        """Keep only these rows (row numbers per head), in this order."""
        counts, rows = listed(keep)
        check(lib.edgekv_evict(self.ctx, il, i32(counts), i32(rows)))

    def write(
        self,
        il: int,
        head: int,
        rows: NDArray[np.int32],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
    ) -> None:
        """These rows of one head become keys [n, d_k] and values [n, d_v], as the cache's type
        holds them. Raises BadInput if that cannot.
        """
        rows = np.ascontiguousarray(rows, np.int32)
        keys, values = (np.ascontiguousarray(x, np.float32) for x in (keys, values))
        assert keys.shape == (len(rows), self.layers[il].d_k) and values.shape == (
            len(rows),
            self.layers[il].d_v,
        )
        check(
            lib.edgekv_write_rows(self.ctx, il, head, len(rows), i32(rows), f32(keys), f32(values))
        )

    def trim_capacity(self) -> None:
        """Room that no row uses goes back to the allocator."""
        check(lib.edgekv_trim_capacity(self.ctx))


def listed(keep: list[NDArray[np.int32]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    counts = np.array([len(x) for x in keep], np.int32)
    rows = (
        np.concatenate([np.asarray(x, np.int32) for x in keep])
        if counts.sum()
        else np.zeros(1, np.int32)
    )
    return counts, np.ascontiguousarray(rows)
