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

SUM = "sum"


class Partial:
    """What was measured on the texts that are done, by their tokens, and a sum over them; kept in the file `path` if there is one.

    key: of the model and of what is measured; what the file has for others, or a file that cannot be read, counts for nothing.
    """

    def __init__(self, path: Path | None, key: str) -> None:
        self.path, self._key = path, key
        self._done: dict[str, NDArray[Any]] = {}
        if path is None or not path.is_file():
            return
        try:
            with path.open("rb") as f, np.load(f, allow_pickle=False) as saved:
                self._done = {name: saved[name] for name in saved.files if name.startswith(key)}
        except (OSError, ValueError, zipfile.BadZipFile):
            pass

    def _name(self, tokens: tuple[int, ...]) -> str:
        return self._key + hashlib.sha256(repr(tokens).encode()).hexdigest()

    def __contains__(self, tokens: tuple[int, ...]) -> bool:
        return self._name(tokens) in self._done

    def __getitem__(self, tokens: tuple[int, ...]) -> NDArray[Any]:
        return self._done[self._name(tokens)]

    @property
    def sum(self) -> NDArray[Any]:
        """Over all texts that are done."""
        return self._done[self._key + SUM]

    def add(self, tokens: tuple[int, ...], found: NDArray[Any], summand: NDArray[Any]) -> None:
        """A text is done. found: what is kept of it; summand: what goes into the sum, which may be large."""
        self._done[self._name(tokens)] = found
        self._done[self._key + SUM] = summand + self._done.get(self._key + SUM, 0)
        if self.path is None:
            return
        fresh = self.path.with_name(self.path.name + ".new")
        try:
            with fresh.open("wb") as f:
                np.savez(f, **self._done)  # type: ignore[arg-type]
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


def name_of(*what: Any) -> str:
    """A name in `Saved` for what a result depends on."""
    return hashlib.sha256(repr(what).encode()).hexdigest()


class Saved:
    """What was found in this run and in an earlier one, by name; kept in the file `path` if there is one.

    A damaged file counts for nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self._done = path, dict[str, Any]()
        try:
            self._done = dict(json.loads(path.read_text())) if path else {}
        except (OSError, ValueError, TypeError):
            pass

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
