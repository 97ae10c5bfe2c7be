"""A model file that a store holds."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    """A model on this computer.

    name: as the command line takes it, 'SOURCE:REST'; path: of its file, of the first where it
    lies in several; also: other names for it, without the source; why_not: why it cannot be used,
    empty if it can.
    """

    name: str
    path: str
    also: tuple[str, ...] = ()
    why_not: str = ""

    @property
    def source(self) -> str:
        """The store's name."""
        return self.name.partition(":")[0]

    def names(self) -> list[list[str]]:
        """What it may be called, the most exact first."""
        rest = self.name.partition(":")[2]
        return [[self.name], [rest], [rest.rpartition("/")[2], *self.also]]


def is_within(path: str, root: str) -> bool:
    """Whether a path, its links followed, lies in the folder `root`."""
    there, real = os.path.realpath(path), os.path.realpath(root)
    return os.path.commonpath([there, real]) == real
