"""What is done of a profile that was stopped, so that the same call goes on.

The files are distrusted: one that is damaged, or is of another model, counts for nothing.
Two processes may make the same profile at once; each keeps all that it has done itself.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgekv.base import files
from edgekv.model.header import open_regular

_MARK = b"edgekv partial 1"
_HASH = 32  # bytes of SHA-256
_MAX_TEXTS = 1 << 12


class Partial:
    """What was measured on the texts that are done, by their tokens, and a sum over them; kept in
    the file `path` if there is one.

    key: of the model and of what is measured. shape: of what is kept of a text, float64 in 0..1.
    summand: shape of what a text adds to the sum, float32.

    The file: a mark, the key's and the content's SHA-256, the sum, and for each text the SHA-256 of
    its tokens and what is kept of it.
    """

    def __init__(
        self, path: Path | None, key: str, shape: tuple[int, ...], summand: tuple[int, ...]
    ) -> None:
        self.path, self._key = path, hashlib.sha256(key.encode()).digest()
        self._shape, self._done = shape, dict[bytes, NDArray[np.float64]]()
        self.sum = np.zeros(summand, np.float32)
        """Over all texts that are done."""
        if path is not None:
            try:
                self._load(path)
            except (OSError, ValueError):
                pass

    def __contains__(self, tokens: tuple[int, ...]) -> bool:
        return _name(tokens) in self._done

    def __getitem__(self, tokens: tuple[int, ...]) -> NDArray[np.float64]:
        return self._done[_name(tokens)]

    def add(
        self, tokens: tuple[int, ...], found: NDArray[np.float64], summand: NDArray[np.float32]
    ) -> None:
        """A text is done. found: what is kept of it; summand: what it adds to the sum.

        Raises BadInput if that cannot be written.
        """
        assert found.shape == self._shape and summand.shape == self.sum.shape
        self._done[_name(tokens)] = found
        self.sum = self.sum + summand
        if self.path is not None:
            self._save(self.path)

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _save(self, path: Path) -> None:
        texts = (name + found.astype("<f8").tobytes() for name, found in self._done.items())
        content = b"".join((self.sum.astype("<f4").tobytes(), *texts))
        with files.replaced(path, files.anything, "stopped profile") as f:
            f.write(_MARK + self._key + hashlib.sha256(content).digest())
            f.write(content)

    def _load(self, path: Path) -> None:
        """Raises OSError or ValueError, and takes nothing, if the file cannot be used."""
        n_front, each = len(_MARK) + 2 * _HASH, _HASH + 8 * int(np.prod(self._shape))
        with open_regular(path) as f:
            n_bytes = os.fstat(f.fileno()).st_size - n_front - self.sum.nbytes
            if n_bytes < 0 or n_bytes % each or n_bytes // each > _MAX_TEXTS:
                raise ValueError("of another size")
            front, content = f.read(n_front), f.read()
        if front != _MARK + self._key + hashlib.sha256(content).digest():
            raise ValueError("damaged, or of something else")
        total = np.frombuffer(content, "<f4", self.sum.size).reshape(self.sum.shape)
        texts = content[self.sum.nbytes :]
        done = {}
        for at in range(0, len(texts), each):
            found = np.frombuffer(texts[at + _HASH : at + each], "<f8").reshape(self._shape)
            if not ((found >= 0) & (found <= 1)).all():
                raise ValueError("no shares")
            done[texts[at : at + _HASH]] = found
        if not np.isfinite(total).all():
            raise ValueError("no sum")
        self.sum, self._done = total, done


def _name(tokens: tuple[int, ...]) -> bytes:
    return hashlib.sha256(repr(tokens).encode()).digest()
