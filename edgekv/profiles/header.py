"""The header of a GGUF file, walked without `gguf`.

Its reader makes an object of every word of a vocabulary, which takes seconds where this takes a tenth of one, and it can run on for
ever in a file that claims more than it has. Here every step is checked against the end of the file.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_FORMATS = ("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", "", "", "<Q", "<q", "<d")  # by GGUF's number of the type
_STRING, _ARRAY = 8, 9
_MANY = 4096  # an array longer than this is a vocabulary and is skipped
DAMAGE = (struct.error, ValueError, IndexError, KeyError, TypeError, ArithmeticError, RecursionError)
"""What a damaged file may raise here."""


@contextmanager
def opened(path: str) -> Iterator[mmap.mmap]:
    """The bytes of a file. Raises OSError, or ValueError for an empty file."""
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


class Header:
    """What stands in front of the tensors.

    meta: the metadata but for long arrays; offsets: tensor name -> bytes behind the header; n_bytes: size of the header.
    Raises one of DAMAGE if the file is no GGUF or ends too early.
    """

    def __init__(self, file: mmap.mmap) -> None:
        self.file, self._at = file, 4
        if file[:4] != b"GGUF" or self._number("<I") < 2:
            raise ValueError("no GGUF of version 2 or later")
        n_tensors, n_keys = self._number("<Q"), self._number("<Q")
        self.meta: dict[str, Any] = {}
        for _ in range(n_keys):
            name = self._string()
            self.meta[name] = self._value(self._number("<I"))
        self.offsets = dict(self._tensor() for _ in range(n_tensors))
        align = self.meta.get("general.alignment", 32)
        self.n_bytes = -(-self._at // align) * align

    def _number(self, form: str) -> Any:
        return struct.unpack_from(form, self.file, self._move(struct.calcsize(form)))[0]

    def _string(self) -> str:
        n = self._number("<Q")
        begin = self._move(n)
        return self.file[begin : begin + n].decode(errors="replace")

    def _move(self, n: int) -> int:
        """Goes on by n bytes; returns where it was."""
        begin, self._at = self._at, self._at + n
        if self._at > len(self.file):
            raise ValueError("the file ends too early")
        return begin

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_FORMATS[kind])
        inner, n = self._number("<I"), self._number("<Q")
        if n <= _MANY:
            return [self._value(inner) for _ in range(n)]
        return self._skip(inner, n)

    def _skip(self, kind: int, n: int) -> None:
        """Walks over an array: only strings have to be looked at one by one."""
        if kind != _STRING:
            self._move(n * struct.calcsize(_FORMATS[kind]))
            return
        at, length = self._at, struct.Struct("<Q").unpack_from
        for _ in range(n):
            at += 8 + length(self.file, at)[0]
        self._move(at - self._at)

    def _tensor(self) -> tuple[str, int]:
        name, n_dims = self._string(), self._number("<I")
        self._move(8 * n_dims + 4)  # sizes and type
        return name, self._number("<Q")
