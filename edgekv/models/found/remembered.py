"""Models that were opened by their path, and folders that the user named.

One file in the user's data. It is distrusted when it is read: what does not look right counts for
nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgekv.base import files, folders
from edgekv.errors import BadInput
from edgekv.model.header import open_regular
from edgekv.models.found import folder, quants
from edgekv.models.found.found import Found

USED, FOLDER = "used", "folder"
_BYTES_MAX, _FILES_MAX, _FOLDERS_MAX = 1 << 20, 200, 100


@dataclass(frozen=True)
class Opened:
    """A model file as it was when it was opened last. size: bytes; time: seconds since 1970."""

    path: str
    size: int
    time: int

    @classmethod
    def of(cls, value: dict[str, Any]) -> Opened:
        """From JSON of its fields. Raises ValueError or TypeError for anything else."""
        found = cls(**value)
        if not (_is_place(found.path) and type(found.size) is type(found.time) is int):
            raise ValueError("no file that was opened")
        return found


@dataclass(frozen=True)
class Remembered:
    """Models that were opened by their path, and folders that were named.

    files: the one that was opened last first; folders: the oldest first.
    """

    files: tuple[Opened, ...] = ()
    folders: tuple[str, ...] = ()


def read() -> Remembered:
    """What is remembered; nothing if the file is damaged."""
    try:
        with open_regular(place()) as file:
            text = file.read(_BYTES_MAX + 1)
        there = json.loads(text) if len(text) <= _BYTES_MAX else {}
        named = tuple(there["folders"])
        if not all(map(_is_place, named)):
            return Remembered()
        return Remembered(tuple(map(Opened.of, there["files"])), named)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return Remembered()


def opened(path: str) -> None:
    """Remember a model file. What is no model, or cannot be written, is passed over."""
    try:
        with open_regular(path) as file:
            if file.read(4) != b"GGUF":
                return
        size = os.path.getsize(path)
    except (OSError, ValueError):
        return
    here, before = os.path.abspath(path), read()
    others = [one for one in before.files if one.path != here]
    now = Opened(here, size, int(time.time()))
    _write(replace(before, files=(now, *others)))


def add_folders(paths: Sequence[str]) -> None:
    """Look for models in these folders from now on. Raises BadInput for what is none."""
    named = [os.path.abspath(os.path.expanduser(path)) for path in paths]
    for path in named:
        if not os.path.isdir(path):
            raise BadInput(f"'{path}' is no folder; name one that has GGUF files in it")
    before = read()
    _write(replace(before, folders=tuple(dict.fromkeys((*before.folders, *named)))))


def forget(paths: Sequence[str]) -> None:
    """Forget folders and files. Raises BadInput for one that is not remembered."""
    before, gone = read(), [os.path.abspath(os.path.expanduser(path)) for path in paths]
    known = {*before.folders, *(one.path for one in before.files)}
    for path in gone:
        if path not in known:
            raise BadInput(f"'{path}' is not remembered; 'edgekv models --json' has the paths")
    kept = tuple(one for one in before.files if one.path not in gone)
    _write(Remembered(kept, tuple(path for path in before.folders if path not in gone)))


def find_used() -> Iterator[Found]:
    """The files that are still there, by their names; by longer ones where two are the same."""
    there = [one.path for one in read().files if os.path.isfile(one.path)]
    short = [quants.stem(os.path.basename(path)) for path in there]
    for name, path in zip(short, there):
        is_one = short.count(name) == 1
        yield Found(f"{USED}:{name if is_one else quants.stem(path)}", path)


def find_in_folders() -> Iterator[Found]:
    """The models of the folders that the user named."""
    for root in read().folders:
        for one in folder.find(FOLDER, [root]):
            below = one.name.partition(":")[2]
            yield replace(one, name=f"{FOLDER}:{os.path.basename(root)}/{below}")


def place() -> Path:
    """The file."""
    return folders.data() / "remembered.json"


def _is_place(path: Any) -> bool:
    return isinstance(path, str) and os.path.isabs(path) and path.isprintable()


def _write(what: Remembered) -> None:
    kept = Remembered(what.files[:_FILES_MAX], what.folders[-_FOLDERS_MAX:])
    try:
        place().parent.mkdir(parents=True, exist_ok=True)
        with files.replaced(place(), files.anything, "list of models") as f:
            f.write(json.dumps(asdict(kept), indent=1).encode())
    except (OSError, BadInput):
        return
