"""GPT4All's models, of its window and of its Python package."""

from __future__ import annotations

import os
from collections.abc import Iterator

from edgekv.models.found import folder, places
from edgekv.models.found.found import Found

NAME = "gpt4all"


def folders() -> list[str]:
    """Where GPT4All keeps models; they need not exist."""
    return [os.path.join(places.data(), "nomic.ai", "GPT4All"), places.home(".cache", "gpt4all")]


def find() -> Iterator[Found]:
    return folder.find(NAME, folders())
