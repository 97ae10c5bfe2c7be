"""The header of a GGUF file, walked without `gguf`.

The reader of `gguf` makes an object of every word of a vocabulary, and believes what a damaged file
says about counts and lengths. Here every step is checked against the end of the file, and time and
memory have limits that no honest model comes near, so that a hostile file is refused at once.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from edgekv.errors import BadInput

_FORMATS = ("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d")  # by GGUF's type number
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_KEYS, _MAX_TENSORS, _MAX_DIMS, _MAX_NAME = 1 << 12, 1 << 14, 4, 256
_MAX_WORDS = 1 << 21
"""Strings in arrays, over the whole header: a vocabulary and its merges have less than half."""
_MAX_VALUE, _MAX_KEPT = 1 << 14, 1 << 20
"""Bytes of one value that is kept, and of all. A chat template or a vocabulary is left out."""
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_MAX_FILES = 1 << 10
DAMAGE = (struct.error, ValueError, IndexError, KeyError, TypeError, ArithmeticError)
"""What a damaged file may raise here."""


class Tensor(NamedTuple):
    """A tensor as a GGUF file's header describes it.

    dims: sizes, the one that varies fastest first; kind: ggml's type number; offset: bytes
    behind the header.
    """

    dims: tuple[int, ...]
    kind: int
    offset: int


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading. Raises OSError, also for a pipe or a device, without waiting."""
    wait_not = getattr(os, "O_NONBLOCK", 0)  # a pipe without a writer would wait for one
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | wait_not))
    if not os.path.isfile(file.fileno()):
        file.close()
        raise OSError(0, "it is no regular file")
    return file


@contextmanager
def opened(path: str) -> Iterator[mmap.mmap]:
    """The bytes of a file. Raises OSError, or ValueError for an empty file."""
    with open_regular(path) as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


class Header:
    """What stands in front of the tensors' data.

    meta: the metadata but for long values and arrays of strings; spans: first byte of each key and
    the one behind its value; n_tensors; tensors: by name; tensors_at, ends_at: first byte of their
    list and the one behind it; n_bytes: size of the header with the padding behind it.
    until: the beginning of a key at which to stop; what stands behind it, and `tensors`, stay out.
    Raises one of DAMAGE if the file is no little-endian GGUF of a known version, ends too early, or
    goes beyond a limit.
    """

    def __init__(self, file: mmap.mmap | bytes, until: str = "") -> None:
        self.file, self._at = file, 4
        self._words, self._kept = _MAX_WORDS, _MAX_KEPT
        if file[:4] != b"GGUF" or self._number("I") not in _VERSIONS:
            raise ValueError("no GGUF of a version that is known")
        n_tensors, n_keys = self._number("Q"), self._number("Q")
        self.n_tensors: int = n_tensors
        if n_tensors > _MAX_TENSORS or n_keys > _MAX_KEYS:
            raise ValueError("more tensors or keys than any model has")
        self.meta: dict[str, Any] = {}
        self.spans: dict[str, tuple[int, int]] = {}
        self.tensors: dict[str, Tensor] = {}
        for _ in range(n_keys):
            begin, name = self._at, self._name()
            if until and name.startswith(until):
                return
            value = self._value(self._number("I"))
            self.spans[name] = begin, self._at
            if value is not None:
                self.meta[name] = value
        self.tensors_at = self._at
        self.tensors = dict(self._tensor() for _ in range(n_tensors))
        self.ends_at = self._at
        align = self.meta.get("general.alignment", 32)
        if type(align) is not int or not 0 < align <= 1 << 16:
            raise ValueError("alignment")
        self.n_bytes = -(-self._at // align) * align

    def _number(self, form: str) -> Any:
        return self._numbers(form, 1)[0]

    def _numbers(self, form: str, n: int) -> tuple[Any, ...]:
        begin = self._move(n * struct.calcsize("<" + form))
        return struct.unpack_from(f"<{n}{form}", self.file, begin)

    def _move(self, n: int) -> int:
        """Go on by n bytes; returns where it was."""
        begin, self._at = self._at, self._at + n
        if self._at > len(self.file):
            raise ValueError("the file ends too early")
        return begin

    def _name(self) -> str:
        n = self._number("Q")
        if n > _MAX_NAME:
            raise ValueError("a name is too long")
        begin = self._move(n)
        return self.file[begin : begin + n].decode(errors="replace")

    def _value(self, kind: int) -> Any:
        """The next value; None for one that is left out."""
        if kind == _STRING:
            n = self._number("Q")
            begin = self._move(n)
            return self.file[begin : begin + n].decode(errors="replace") if self._keeps(n) else None
        if kind != _ARRAY:
            return self._number(_scalar(kind))
        inner, n = self._number("I"), self._number("Q")
        if inner == _STRING:
            return self._skip_strings(n)
        form = _scalar(inner)  # llama.cpp knows no arrays of arrays either
        n_bytes = n * struct.calcsize("<" + form)
        if self._at + n_bytes <= len(self.file) and self._keeps(n_bytes):
            return list(self._numbers(form, n))
        self._move(n_bytes)
        return None

    def _keeps(self, n_bytes: int) -> bool:
        """Whether a value of n bytes is kept: none that is long, and not too much in all."""
        if n_bytes > min(_MAX_VALUE, self._kept):
            return False
        self._kept -= n_bytes
        return True

    def _skip_strings(self, n: int) -> None:
        """Walk over an array of strings, which have to be looked at one by one."""
        self._words -= n
        if self._words < 0:
            raise ValueError("more words than any vocabulary has")
        at, length = self._at, struct.Struct("<Q").unpack_from
        for _ in range(n):
            at += 8 + length(self.file, at)[0]
        self._move(at - self._at)

    def _tensor(self) -> tuple[str, Tensor]:
        name, n_dims = self._name(), self._number("I")
        if n_dims > _MAX_DIMS:
            raise ValueError("a tensor has too many dimensions")
        dims = self._numbers("Q", n_dims)
        return name, Tensor(dims, self._number("I"), self._number("Q"))


def header_of(path: str) -> Header | None:
    """The header of a file, whose bytes are closed. None for a file that cannot be read or is
    damaged: whoever loads it says what is wrong.
    """
    try:
        with opened(path) as data:
            return Header(data)
    except (OSError, *DAMAGE):
        return None


def _scalar(kind: int) -> str:
    """The format of a kind of number. Raises IndexError or ValueError if it is none."""
    if not _FORMATS[kind]:
        raise ValueError("a string or an array where a number belongs")
    return _FORMATS[kind]


def files_of(path: str | Path) -> list[str]:
    """The files of a model that lies in several, as llama.cpp names them; else the one."""
    match = _PART.fullmatch(str(path))
    n = int(match[3]) if match else 0
    if not match or not 0 < n <= _MAX_FILES:
        return [str(path)]
    return [f"{match[1]}-{i:05d}-of-{match[3]}.gguf" for i in range(1, n + 1)]


def file_bytes(path: str | Path) -> int:
    """Bytes of a model's files, of those that are there."""
    n = 0
    for file in files_of(path):
        with suppress(OSError):
            n += os.path.getsize(file)
    return n


def tensor_sizes(path: str | Path) -> dict[str, int]:
    """Bytes of each tensor by name, of all files of a model.

    Raises BadInput for a file that cannot be read or is damaged.
    """
    return {name: size for file in files_of(path) for name, size in _sizes_in_file(file).items()}


def _sizes_in_file(path: str) -> dict[str, int]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        with opened(path) as data:
            tensors = Header(data).tensors
        blocks = {
            name: GGML_QUANT_SIZES[GGMLQuantizationType(t.kind)] for name, t in tensors.items()
        }
    except (OSError, *DAMAGE):
        raise BadInput(f"{path} cannot be read, or it is damaged: download it again") from None
    return {
        name: math.prod(t.dims) // blocks[name][0] * blocks[name][1] for name, t in tensors.items()
    }
