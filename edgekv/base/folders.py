"""This user's folders: what the platform calls them, and `edgekv` in it. They need not exist."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache() -> Path:
    """What can be made again."""
    return _folder("XDG_CACHE_HOME", "~/.cache", "~/Library/Caches")


def data() -> Path:
    """What the user would miss."""
    return _folder("XDG_DATA_HOME", "~/.local/share", "~/Library/Application Support")


def _folder(variable: str, usual: str, mac: str) -> Path:
    """A variable that names no absolute path is ignored, as the XDG specification says."""
    if sys.platform == "win32":
        variable, usual = "LOCALAPPDATA", "~/AppData/Local"
    elif sys.platform == "darwin":
        variable, usual = "", mac
    wish = os.path.expanduser(os.environ.get(variable, ""))
    return Path(wish if os.path.isabs(wish) else os.path.expanduser(usual)) / "edgekv"
