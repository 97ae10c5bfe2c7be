"""The ragged store of a context."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.native.bindings import CLayerInfo, CMemoryInfo, lib
from edgekv.native.infos import LayerInfo, MemoryInfo


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
        lib.edgekv_layer_get(self.ctx, il, info)
        return LayerInfo(*(getattr(info, n) for n, *_ in CLayerInfo._fields_))

    @property
    def plain(self) -> bool:
        """Whether rows are stored as llama.cpp's cache stores them: whole keys, rounded at once."""
        return not any(layer.has_basis or layer.rounds_late for layer in self.layers)

    def make_plain(self) -> None:
        """See `plain`. Raises EdgeKVError unless the store is empty."""
        lib.edgekv_make_plain(self.ctx)
        self.layers = [self._layer(il) for il in range(len(self.layers))]

    def memory(self) -> MemoryInfo:
        info = CMemoryInfo()
        lib.edgekv_memory_get(self.ctx, info)
        return MemoryInfo(*(getattr(info, n) for n, *_ in CMemoryInfo._fields_))

    def mark(self) -> None:
        """Let the tokens that come be taken back, all at once, until the conversation is
        compressed.

        For a model with recurrent layers, of whose state a copy is made; others need none.
        """
        lib.edgekv_mark_tokens(self.ctx)

    def keep_state(self) -> None:
        """Let `take_back` go to where the conversation is now, whatever comes behind it, until it
        changes places or is compressed. For a model with recurrent layers, as `mark`, which stays.
        """
        lib.edgekv_keep_state(self.ctx)

    def round_rows(self) -> None:
        """Round what waits in f16, so that tokens that come see the same rows, however many more
        come before the conversation is taken back to where it is.
        """
        lib.edgekv_round_rows(self.ctx)

    def archive(self, folder: str, recall: float = 0.0, index_bits: int = 64) -> None:
        """Give conversations that begin from now on an archive in a file without a name in
        `folder`: see `edgekv_archive_on` in edgekv.h.

        Raises Unsupported for a model that has none, EdgeKVError if there can be no such file.
        """
        lib.edgekv_archive_on(self.ctx, folder.encode(), recall, index_bits)

    def why_no_archive(self) -> str:
        """Why the conversation has no archive any more; empty if it has one, or never had."""
        return str(lib.edgekv_archive_lost(self.ctx).decode(errors="replace"))

    def length(self, il: int) -> NDArray[np.int32]:
        """int32 [n_head_kv]: rows that attention reads."""
        out = np.empty(self.layers[il].n_head_kv, np.int32)
        lib.edgekv_len(self.ctx, il, out)
        return out

    def positions(self, il: int, head: int) -> NDArray[np.int32]:
        """int32 [rows]: the token index of each row, in the order of the store."""
        out = np.empty(self.length(il)[head], np.int32)
        lib.edgekv_pos(self.ctx, il, head, out)
        return out

    def rows(
        self, il: int, head: int, some: NDArray[np.int32] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """K [rows, d_k] and V [rows, d_v] of one head as float32; or of `some` of its rows."""
        n, info = int(self.length(il)[head]), self.layers[il]
        k, v = np.empty((n, info.d_k), np.float32), np.empty((n, info.d_v), np.float32)
        lib.edgekv_rows_f32(self.ctx, il, head, k, v)
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
        lib.edgekv_rows_bytes(self.ctx, il, head, k, v)
        return tuple(b.raw if b and n else b"" for b in (k, v))  # type: ignore[return-value]

    def evict(self, il: int, keep: list[NDArray[np.int32]]) -> None:
        """Keep only these rows (row numbers per head), in this order."""
        counts, rows = listed(keep)
        lib.edgekv_evict(self.ctx, il, counts, rows)

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
        info, n = self.layers[il], len(rows)
        assert keys.shape == (n, info.d_k) and values.shape == (n, info.d_v)
        lib.edgekv_write_rows(self.ctx, il, head, n, rows, keys, values)

    def trim_capacity(self) -> None:
        """Room that no row uses goes back to the allocator."""
        lib.edgekv_trim_capacity(self.ctx)


def listed(keep: list[NDArray[np.int32]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    counts = np.array([len(x) for x in keep], np.int32)
    if not counts.sum():
        return counts, np.zeros(1, np.int32)
    return counts, np.concatenate([np.asarray(x, np.int32) for x in keep])
