"""Where the system has programs keep what is theirs."""

from __future__ import annotations

import os
import sys


def home(*names: str) -> str:
    """A path in the user's folder."""
    return os.path.join(os.path.expanduser("~"), *names)


def cache() -> str:
    """What can be made again."""
    return _place("XDG_CACHE_HOME", "LOCALAPPDATA", ".cache", "Library/Caches")


def data() -> str:
    """What the user would miss."""
    return _place("XDG_DATA_HOME", "LOCALAPPDATA", ".local/share", "Library/Application Support")


def settings() -> str:
    """How programs are set up."""
    return _place("XDG_CONFIG_HOME", "APPDATA", ".config", "Library/Application Support")


def _place(variable: str, windows: str, usual: str, mac: str) -> str:
    if sys.platform == "darwin":
        return home(*mac.split("/"))
    wish = os.environ.get(windows if sys.platform == "win32" else variable, "")
    return wish if os.path.isabs(wish) else home(*usual.split("/"))
