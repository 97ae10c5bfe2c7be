"""Bytes of each tensor of a GGUF file, from its header alone: the vocabulary in front of it is skipped, which a reader of it takes seconds for."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

STRING, ARRAY = 8, 9
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Of GGUF's kinds of values that are numbers."""


def tensor_sizes(path: str | Path) -> dict[str, int]:
    """By name; of a model in several files only those of the one that is named. The file is known to be a GGUF."""
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _Header(data)
        n_tensors, n_values = header.numbers("<QQ")
        for _ in range(n_values):
            header.string()
            header.skip(header.numbers("<I")[0])
        return dict(header.tensor() for _ in range(n_tensors))


class _Header:
    """What is read next."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 8  # behind magic number and version

    def numbers(self, form: str) -> tuple[int, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def string(self) -> str:
        (n,) = self.numbers("<Q")
        self._at += n
        return self._data[self._at - n : self._at].decode(errors="replace")

    def skip(self, kind: int) -> None:
        if kind == ARRAY:
            inner, n = self.numbers("<IQ")
            if inner in WIDTHS:
                self._at += n * WIDTHS[inner]
            else:
                for _ in range(n):
                    self.skip(inner)
        elif kind == STRING:
            (n,) = self.numbers("<Q")
            self._at += n
        else:
            self._at += WIDTHS[kind]

    def tensor(self) -> tuple[str, int]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name, (n_dims,) = self.string(), self.numbers("<I")
        n = 1
        for width in self.numbers(f"<{n_dims}Q"):
            n *= width
        kind, _offset = self.numbers("<IQ")
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        return name, n // block * size
