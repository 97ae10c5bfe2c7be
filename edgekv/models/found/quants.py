"""What names of GGUF files say: quantisation, and which part of how many."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

USUAL = ("Q4_K_M", "Q8_0")
"""What llama.cpp looks for where no quantisation is named."""
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(r"[-.]([A-Z0-9_]+)$", re.IGNORECASE)
_NO_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-", "kvbudget-")


class Part(NamedTuple):
    """The name of one file of a model that lies in several.

    stem: what all parts share; number: from 1; total: how many there are.
    """

    stem: str
    number: int
    total: int

    @property
    def names(self) -> list[str]:
        """The names of all parts."""
        return [f"{self.stem}-{i:05d}-of-{self.total:05d}.gguf" for i in range(1, self.total + 1)]

    @property
    def first(self) -> str:
        return f"{self.stem}-00001-of-{self.total:05d}.gguf"


def split_of(name: str) -> Part | None:
    """Which part of a model a file is by its name or path; None for a file that is the whole."""
    match = _PART.fullmatch(name)
    return Part(match[1], int(match[2]), int(match[3])) if match and int(match[3]) > 1 else None


def stem(name: str) -> str:
    """A file's name or path without its ending and the number of its part."""
    part = split_of(name)
    return part.stem if part else re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)


def tag(name: str) -> str:
    """The quantisation that a file's name ends with, in capitals; empty if there is none."""
    match = _TAG.search(stem(name).rpartition("/")[2])
    return match[1].upper() if match else ""


def is_model(name: str) -> bool:
    """Whether a file may be a model's, by its name: no projector, no draft."""
    last = name.rpartition("/")[2]
    return last.lower().endswith(".gguf") and not any(word in last for word in _NO_MODELS)


def best(names: Iterable[str], wanted: str) -> str | None:
    """The file that llama.cpp would take of a repository's, None if there is none.

    wanted: a quantisation, empty for the usual ones and then for the first file.
    """
    files = [name for name in names if is_model(name) and _is_first(name)]
    tags: Sequence[str] = [wanted] if wanted else USUAL
    for one in tags:
        pattern = re.compile(re.escape(one) + "[.-]", re.IGNORECASE)
        for name in files:
            if pattern.search(name):
                return name
    return files[0] if files and not wanted else None


def _is_first(name: str) -> bool:
    part = split_of(name)
    return part is None or part.number == 1
