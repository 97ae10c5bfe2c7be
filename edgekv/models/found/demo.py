"""The demo model, if its package is installed."""

from __future__ import annotations

from collections.abc import Iterator

from edgekv.errors import BadInput
from edgekv.models.demo import demo_path
from edgekv.models.found.found import Found

NAME = "demo"


def find() -> Iterator[Found]:
    """The one model."""
    try:
        yield Found(NAME, str(demo_path()))
    except BadInput:
        return
