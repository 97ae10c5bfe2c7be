"""The rows of all tokens of a conversation, apart from it."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

from edgekv.native.bindings import CArchiveInfo, lib


class Archive:
    """An archive: `take` is that of the conversation in a context. Two that have rows in common
    share a file until one of them is written to there.
    """

    def __init__(self, handle: int) -> None:
        """handle: edgekv.h's, which is freed with this object."""
        self._handle = handle
        weakref.finalize(self, lib.edgekv_archive_free, handle).atexit = False

    @classmethod
    def take(cls, ctx: Any) -> Archive | None:
        """That of the conversation in `ctx`, None if it has none."""
        handle = lib.edgekv_archive_take(ctx)
        return cls(handle) if handle else None

    @classmethod
    def new(cls, ctx: Any, n_tokens: int, n_known: int) -> Archive:
        """One for the context, to be filled with `put_piece` and `index`.

        Raises EdgeKVError if the context has no archives, or there is no file for it, and BadInput
        if the numbers make no sense.
        """
        return cls(lib.edgekv_archive_new(ctx, CArchiveInfo(n_tokens, n_known)))

    @property
    def info(self) -> CArchiveInfo:
        """Tokens and bytes, see `edgekv_archive_info` in edgekv.h."""
        out = CArchiveInfo()
        lib.edgekv_archive_get(self._handle, out)
        return out

    def put(self, ctx: Any, alone: bool = False) -> None:
        """The conversation in `ctx` has this archive from now on.

        alone: the conversation becomes the archive's tokens, with no row in memory: some of them
        are to be read again. Raises EdgeKVError if it is not of this conversation, or alone is not
        enough.
        """
        lib.edgekv_archive_put(ctx, self._handle, alone)

    def sizes(self) -> Iterator[int]:
        """Bytes of each piece: rows of one tensor and KV head."""
        i = 0
        while (n := lib.edgekv_archive_piece_bytes(self._handle, i)) >= 0:
            yield n
            i += 1

    def pieces(self) -> Iterator[Any]:
        """The rows of each, as ctypes arrays of bytes. Raises EdgeKVError."""
        for i, n in enumerate(self.sizes()):
            rows = (ctypes.c_uint8 * n)()
            if n:
                lib.edgekv_archive_piece_get(self._handle, i, rows)
            yield rows

    def put_piece(self, i: int, rows: Any) -> None:
        """Fill one. Raises BadInput for rows that are no numbers, EdgeKVError on a full disk."""
        if len(rows):
            lib.edgekv_archive_piece_put(self._handle, i, rows)

    def index(self, ctx: Any, n_judged: int) -> None:
        """Make the index of what was filled in. n_judged: keys that it goes by."""
        lib.edgekv_archive_index(ctx, self._handle, n_judged)
