#!/usr/bin/env python3
"""Print a hash of every file that the package is made from, its native libraries included.

cli.py builds anew when it changes. A build writes it into edgekv/lib/build-info.json, so that a
wheel can be told from one of other sources. Only the standard library is used.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ("pyproject.toml", "CMakeLists.txt", "edgekv", "native", "patches")
# What an editable or developer's build puts into the package.
BUILT = (ROOT / "edgekv" / "lib", ROOT / "edgekv" / "llama_cpp")


def digest_sources(*names: str) -> str:
    """names: files and folders of the checkout; without any, those that the package is made of."""
    digest = hashlib.sha256()
    for name in names or PACKAGE:
        top = ROOT / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if not path.is_file() or "__pycache__" in path.parts or {*BUILT} & {*path.parents}:
                continue
            digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


if __name__ == "__main__":
    print(digest_sources())
