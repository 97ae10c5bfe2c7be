"""Which models there are, by name."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

from edgekv.errors import BadInput
from edgekv.models.found import folder
from edgekv.models.found.found import Found
from edgekv.models.found.stores import everything
from edgekv.models.names import matches, nearest

FRESH_S = 5.0
"""Seconds after which the folders are looked at again."""


class Catalog:
    """The models of this computer, and those of a folder before them. Any thread may ask."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._there: list[Found] = []
        self._until = 0.0

    def all(self) -> list[Found]:
        """The models that can be used, each file once."""
        with self._lock:
            if time.monotonic() >= self._until:
                self.refresh()
            return self._there

    def refresh(self) -> None:
        """Look at the folders."""
        there: dict[str, Found] = {}
        for one in self._find():
            if not one.why_not:
                there.setdefault(os.path.realpath(one.path), one)
        self._there, self._until = list(there.values()), time.monotonic() + FRESH_S

    def _find(self) -> Iterator[Found]:
        for one in folder.find("", [self._folder] if self._folder else []):
            name = one.name.removeprefix(":")
            yield replace(one, name=name, also=(name.rpartition("/")[2],))
        yield from everything()

    def named(self, name: str) -> Found:
        """Raises BadInput for a name that means no model, or several."""
        there = self.all()
        found = matches(name, there) or matches(name.removesuffix(":latest"), there)
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(one.name for one in found[:6])
            raise BadInput(f"'{name}' means several models; give one of: {names}")
        more = nearest(name, there) or "GET /v1/models lists what there is"
        raise BadInput(f"there is no model '{name}'; {more}")
