"""The lines above a table, and the demo's file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "lab")]

from edgekv_lab.record import commit, machine  # noqa: E402

__all__ = ["demo_path", "heading", "machine"]


def demo_path() -> Path:
    from edgekv.models.demo import demo_path as find

    return Path(find())


def heading(script: str) -> str:
    """Machine, commit and command line."""
    command = shlex.join(["python", f"benchmarks/{script}", *sys.argv[1:]])
    return f"`{command}`, commit {commit()}, {machine()}\n"
