"""What PyInstaller has to know of edgekv: it asks for the folder of the hook by the entry point
`pyinstaller40`.
"""

from __future__ import annotations

from pathlib import Path


def hook_dirs() -> list[str]:
    """The folder with `hook-edgekv.py`."""
    return [str(Path(__file__).parent)]
