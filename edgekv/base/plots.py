"""Figures, and the files that they go to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgekv.base import files
from edgekv.errors import EdgeKVError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
IS_PNG = files.begins_with(b"\x89PNG")


def figure(width: float, height: float) -> Figure:
    """An empty figure, sizes in inches. Raises EdgeKVError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise EdgeKVError(
            "a picture needs matplotlib; run: pip install 'edgekv[profile]'"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as a PNG.

    Raises BadInput if the file cannot be written, or if anything but a PNG is there.
    """
    with files.replaced(path, IS_PNG, "picture") as f:
        figure.savefig(f, format="png", dpi=DPI)


def check(path: str | Path) -> None:
    """Raises BadInput if a picture cannot be put there: before minutes of work, not after."""
    files.check(path, IS_PNG, "picture")
