"""What PyInstaller asks by the entry point `pyinstaller40`: the folder of the hook."""

from __future__ import annotations

from pathlib import Path


def hook_dirs() -> list[str]:
    """The folder with `hook-edgekv.py`."""
    return [str(Path(__file__).parent)]
