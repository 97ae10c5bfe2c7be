"""Files of models in a folder, with distrust: links are not followed out of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from edgekv.models.found.found import is_within
from edgekv.models.found.quants import split_of

DEPTH_MAX = 6
FOLDERS_MAX = 20_000
LINK = "it is a link that leads out of the folder; give the path of the file itself"
GONE = "its data is missing"


@dataclass(frozen=True)
class File:
    """A GGUF file in a folder.

    name: path below the folder, with '/' and the ending; why_not: why it cannot be used.
    """

    name: str
    path: str
    why_not: str = ""


def gguf_files(root: str) -> Iterator[File]:
    """The GGUF files below a folder in the order of their names, of a model in several the first.

    Profiles of edgekv's are left out. An unreadable folder is passed over.
    """
    for folder, folders, names in islice(os.walk(root), FOLDERS_MAX):
        inner = os.path.relpath(folder, root)
        depth = 0 if inner == os.curdir else len(inner.split(os.sep))
        folders[:] = sorted(folders) if depth < DEPTH_MAX else []
        for name in sorted(names):
            if not name.lower().endswith(".gguf") or name.startswith("kvbudget-"):
                continue
            part = split_of(name)
            if part and part.number > 1 and part.first in names:
                continue
            path = os.path.join(folder, name)
            below = name if depth == 0 else "/".join([*inner.split(os.sep), name])
            yield File(below, path, why_not(path, root))


def why_not(path: str, root: str) -> str:
    """Why a file of the folder `root` cannot be used by what it is; empty if it can."""
    if not is_within(path, root):
        return LINK
    if not os.path.lexists(path) or os.path.islink(path) and not os.path.exists(path):
        return GONE
    return "" if os.path.isfile(path) else "it is no regular file"
