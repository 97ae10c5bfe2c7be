"""Results in a file of JSON, which is distrusted: one that is damaged counts for nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from edgekv.base import files
from edgekv.model.header import open_regular

_MAX_JSON = 1 << 26


def save_json(path: Path, state: Any) -> None:
    """`state` in the file `path`, written beside and renamed. Raises BadInput if that cannot be
    done.
    """
    with files.replaced(path, files.anything, "record") as f:
        f.write(json.dumps(state).encode())


def load_json(path: Path) -> dict[str, Any]:
    """What `save_json` wrote; empty for a file that is missing, is damaged, or holds other data."""
    try:
        with open_regular(path) as f:
            state = json.loads(f.read(_MAX_JSON))  # one that is cut off is damaged
    except (OSError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def name_of(*what: Any) -> str:
    """A name in `Saved` for what a result depends on."""
    return hashlib.sha256(repr(what).encode()).hexdigest()


class Saved:
    """What was found in this run and in an earlier one, by name; kept in the file `path` if there
    is one.

    A damaged file counts for nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self._done = path, load_json(path) if path else {}

    def __contains__(self, name: str) -> bool:
        return name in self._done

    def __getitem__(self, name: str) -> Any:
        return self._done[name]

    def put(self, name: str, value: Any) -> None:
        self._done[name] = value
        if self.path is not None:
            save_json(self.path, self._done)

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
