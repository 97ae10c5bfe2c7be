"""What tells files apart without reading them whole: SHA-256 of pieces at even distances."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Protocol

from edgekv.base import files

N_PIECES, PIECE = 256, 1 << 16
"""Pieces of a file, and bytes of each, that go into its fingerprint."""
_known: dict[tuple[int, ...], str] = {}
"""Fingerprints of files as they were: each saved conversation asks for its model's."""


class Seekable(Protocol):
    """An open file, or a mapped one."""

    def seek(self, position: int, /) -> object: ...
    def read(self, n_bytes: int, /) -> bytes: ...


def of(f: Seekable, spans: Iterable[tuple[int, int]], n_pieces: int, piece: int) -> str:
    """SHA-256 (hex) of the sizes of parts of a file, and of pieces of each part.

    spans: (first byte, bytes) of each part. n_pieces: 2 or more for each, of `piece` bytes, the
    first at its begin and the last at its end; they may overlap.
    """
    digest = hashlib.sha256()
    for first, size in spans:
        digest.update(str(size).encode())
        last = max(size - piece, 0)
        for begin in sorted({last * i // (n_pieces - 1) for i in range(n_pieces)}):
            f.seek(first + begin)
            digest.update(f.read(min(piece, size)))
    return digest.hexdigest()


def fingerprint(path: str) -> str:
    """SHA-256 (hex) of a file's size and of pieces at even distances.

    Raises BadInput if it cannot be read.
    """
    with files.opened(path) as f:
        now = os.fstat(f.fileno())
        key = now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns
        if key not in _known:
            _known[key] = of(f, [(0, now.st_size)], N_PIECES, PIECE)
        return _known[key]
