"""Made-up folders of programs that keep models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_NAMES = ("HF_", "HUGGINGFACE_", "XDG_", "OLLAMA_", "LLAMA_")


def empty_home(monkeypatch: Any, folder: Path) -> Path:
    """Makes a folder the user's, in which nothing lies; whatever the environment says of others is
    gone.
    """
    for name in list(os.environ):
        if name.startswith(_NAMES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HOME", str(folder))
    return folder


def put(path: Path, data: bytes = b"GGUF") -> Path:
    """Write a file, and the folders that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
