"""Jan's models: one folder each, in which the file is often called model.gguf."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from edgekv.models.found import folder, places
from edgekv.models.found.found import Found

NAME = "jan"


def folders() -> list[str]:
    """Where Jan keeps models, now and before; they need not exist."""
    roots = [os.path.join(x, "Jan", "data") for x in (places.data(), places.settings())]
    roots += [places.home("jan")]
    return [
        os.path.join(root, *inner)
        for root in roots
        for inner in (["llamacpp", "models"], ["models"])
    ]


def find() -> Iterator[Found]:
    """The models; where the file is called model.gguf its folder's name is the model's."""
    for one in folder.find(NAME, folders()):
        yield replace(one, name=one.name.removesuffix("/model"))
