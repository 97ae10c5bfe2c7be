"""What was found out about a model file, remembered so that the next listing need not look again.

One file in the user's cache. It is distrusted when it is read: what does not look right is found
out anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edgekv.base import files, folders
from edgekv.errors import BadInput
from edgekv.model.header import open_regular

_BYTES_MAX, _ENTRIES_MAX = 1 << 23, 2000


@dataclass(frozen=True)
class Judged:
    """What a model's header says about running it here.

    kv_bytes: of one token with K and V in f16; n_ctx: tokens that `ways` are for; why: the
    reason if the cache cannot be compressed; ways: (ratio, type of the cache, bytes at the peak
    without the process), what is given up least first; no_model: why it writes no text, with
    nothing else known.
    """

    arch: str = ""
    kv_bytes: int = 0
    n_ctx: int = 0
    why: str = ""
    ways: tuple[tuple[float, str, int], ...] = ()
    no_model: str = ""

    @classmethod
    def of(cls, value: dict[str, Any]) -> Judged:
        """From JSON of its fields. Raises ValueError or TypeError for anything else."""
        found = cls(**value)
        ways = tuple((float(ratio), str(kind), int(peak)) for ratio, kind, peak in found.ways)
        texts, numbers = (found.arch, found.why, found.no_model), (found.kv_bytes, found.n_ctx)
        if not all(type(x) is str and x.isprintable() for x in (*texts, *(w[1] for w in ways))):
            raise ValueError("no text to print")
        if not all(type(x) is int and x >= 0 for x in numbers):
            raise ValueError("no number of a model")
        if not all(0 < ratio <= 1 for ratio, _, _ in ways):
            raise ValueError("no ratio")
        return cls(found.arch, *numbers, found.why, ways, found.no_model)

    def best(self, n_bytes: int) -> tuple[float, str] | None:
        """Ratio and type of the first way that takes at most so many bytes."""
        fits = ((ratio, kind) for ratio, kind, peak in self.ways if peak <= n_bytes)
        return next(fits, None)


def key(paths: Sequence[str], *more: object) -> str:
    """What a judgement depends on: the model's files, and whatever else is given.

    Raises OSError if a file is missing.
    """
    seen = [(os.path.realpath(path), os.stat(path)) for path in paths]
    return json.dumps([[[name, s.st_size, s.st_mtime_ns] for name, s in seen], *map(str, more)])


class Judgements:
    """Judgements by `key`; `save` keeps those asked for, and others while there is room."""

    def __init__(self) -> None:
        self._path = folders.cache() / "models.json"
        self._known, self._used, self._is_new = _read(self._path), dict[str, Judged](), False

    def get(self, key: str) -> Judged | None:
        """What is known."""
        found = self._known.get(key)
        if found:
            self._used[key] = found
        return found

    def put(self, key: str, judged: Judged) -> None:
        self._used[key], self._is_new = judged, True

    def save(self) -> None:
        """Write the file if there is something new. A cache that cannot be written is let be."""
        if not self._is_new:
            return
        others = [item for item in self._known.items() if item[0] not in self._used]
        kept = dict([*self._used.items(), *others][:_ENTRIES_MAX])
        text = json.dumps({name: asdict(one) for name, one in kept.items()})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with files.replaced(self._path, files.anything, "list of models") as f:
                f.write(text.encode())
        except (OSError, BadInput):
            return


def _read(path: os.PathLike[str]) -> dict[str, Judged]:
    try:
        with open_regular(path) as file:
            text = file.read(_BYTES_MAX + 1)
        there = json.loads(text) if len(text) <= _BYTES_MAX else {}
        return {str(name): Judged.of(value) for name, value in there.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
