"""The checkout that some experiments need, for what is built or written in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgekv.errors import EdgeKVError
from edgekv_lab.process import call


def root() -> Path:
    """The checkout's folder, whose `tests` can be imported then: this file's, or the one in which
    the command runs. Raises EdgeKVError if there is none."""
    here = Path.cwd()
    for place in (*Path(__file__).resolve().parents, here, *here.parents):
        if (place / "native" / "upstream.py").exists() and (place / "tests").is_dir():
            if str(place) not in sys.path:
                sys.path.append(str(place))
            return place
    raise EdgeKVError("this experiment needs a checkout of edgekv: run it in one")


def stock_environment() -> dict[str, str]:
    """Of a process that has the unpatched library ($EDGEKV_STOCK_LIB, else built once)."""
    root()
    from tests.lib import stock_folder

    return {**os.environ, "EDGEKV_LIB": str(stock_folder())}


def side(function: str, request: Mapping[str, Any], is_stock: bool) -> Any:
    """What a function of `edgekv_lab.sides` returns, with the libraries of its side."""
    environment = stock_environment() if is_stock else None
    return call(f"edgekv_lab.sides.{function}", request, environment=environment)


def native(program: str) -> str:
    """The path of a native test program. Raises EdgeKVError if it was not built."""
    folder = Path(os.environ.get("EDGEKV_NATIVE_TESTS") or root() / "build" / "native-tests")
    for path in (folder / program, folder / f"{program}.exe"):
        if path.exists():
            return str(path)
    raise EdgeKVError(
        f"{program} is not in {folder}: `python3 cli.py test` builds it, or set"
        " EDGEKV_NATIVE_TESTS to its folder"
    )
