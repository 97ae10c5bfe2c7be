"""What is done of a profile that was stopped, so that the same call goes on."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import BadInput


class Partial:
    """What was measured on the texts that are done, arrays by name, by their tokens; kept in the file `path` if there is one.

    key: of the model and of what is measured; what the file has for others, or a file that cannot be read, counts for nothing.
    """

    def __init__(self, path: Path | None, key: str) -> None:
        self.path, self._key = path, key
        self._done: dict[str, dict[str, NDArray[Any]]] = {}
        if path is None or not path.is_file():
            return
        try:
            with path.open("rb") as f, np.load(f, allow_pickle=False) as saved:
                for text, _, part in (name.partition(".") for name in saved.files if name.startswith(key)):
                    self._done.setdefault(text, {})[part] = saved[f"{text}.{part}"]
        except (OSError, ValueError, zipfile.BadZipFile):
            self._done = {}

    def _name(self, tokens: tuple[int, ...]) -> str:
        return self._key + hashlib.sha256(repr(tokens).encode()).hexdigest()

    def __contains__(self, tokens: tuple[int, ...]) -> bool:
        return self._name(tokens) in self._done

    def __getitem__(self, tokens: tuple[int, ...]) -> dict[str, NDArray[Any]]:
        return self._done[self._name(tokens)]

    def add(self, tokens: tuple[int, ...], **found: NDArray[Any]) -> None:
        self._done[self._name(tokens)] = found
        if self.path is None:
            return
        fresh = self.path.with_name(self.path.name + ".new")
        try:
            with fresh.open("wb") as f:
                np.savez(f, **{f"{text}.{part}": x for text, parts in self._done.items() for part, x in parts.items()})  # type: ignore[arg-type]
            os.replace(fresh, self.path)
        except OSError as error:
            raise BadInput(f"{self.path} cannot be written ({error.strerror}); choose another place") from None

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def save_json(path: Path, state: Any) -> None:
    """`state` in the file `path`, written beside and renamed. Raises BadInput if that cannot be done."""
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.write_text(json.dumps(state))
        fresh.replace(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror}); choose another place") from None
