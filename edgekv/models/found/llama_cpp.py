"""What llama.cpp has downloaded: LLAMA_CACHE, or its folder in the user's cache.

Newer versions keep repositories of Hugging Face there, in Hugging Face's layout.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from edgekv.models.found import folder, hugging_face, places
from edgekv.models.found.found import Found

NAME = "llama.cpp"


def root() -> str:
    """llama.cpp's folder; it need not exist."""
    return os.environ.get("LLAMA_CACHE") or os.path.join(places.cache(), "llama.cpp")


def find() -> Iterator[Found]:
    """Single files, and repositories."""
    for one in folder.find(NAME, [root()]):
        if not one.name.startswith(f"{NAME}:{hugging_face.PREFIX}"):
            yield one
    for one in hugging_face.repositories(root()):
        yield replace(one, name=f"{NAME}:{one.name.partition(':')[2]}")
