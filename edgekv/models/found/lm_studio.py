"""LM Studio's models: PUBLISHER/REPOSITORY/FILE."""

from __future__ import annotations

import os
from collections.abc import Iterator

from edgekv.models.found import folder
from edgekv.models.found.found import Found

NAME = "lmstudio"


def folders() -> list[str]:
    """Where LM Studio keeps models; they need not exist."""
    return [os.path.expanduser(x) for x in ("~/.lmstudio/models", "~/.cache/lm-studio/models")]


def find() -> Iterator[Found]:
    return folder.find(NAME, folders())
