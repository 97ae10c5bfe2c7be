"""Conversations in a folder: files of `edgekv.conversation.session`, bounded together in size."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from edgekv.base.files import expanded, made_folder
from edgekv.conversation import session
from edgekv.conversation.holder import Holder
from edgekv.conversation.losses import Losses
from edgekv.conversation.parked import archives_all
from edgekv.conversation.settings_digest import base_of, settings_of
from edgekv.conversation.state import State
from edgekv.conversation.talk import Entry
from edgekv.errors import BadInput

OTHERS = "it is of another method, of other limits, or of another version of edgekv"
SUFFIX = ".kvtalk"
NOTE = {"settings", "least", "name", "is_boundary"}
"""What each note says."""
NEWER = {"turn", "turns", "base"}
"""What newer ones say besides."""
LOOK_S = 1.0
"""Seconds after which the folder is looked at again."""
_OVERHEAD = 1 << 17
"""At least as many bytes as a file has besides tokens, state and what the engine remembers."""


class Shelf:
    """A folder of conversations, which may be those of several models.

    Raises BadInput if the folder can neither be found nor made.
    """

    def __init__(self, folder: str, limit: int) -> None:
        self.folder = expanded(folder)
        self._limit = limit
        self._mine: dict[Path, Entry] = {}
        """Files that may go: of this model and these settings."""
        self._files: dict[Path, os.stat_result] = {}
        """Of anybody, as far as is known; the one used first comes first."""
        self._looked = -math.inf
        made_folder(self.folder, "name another", 0o700)

    def entries(self, llm: Holder, losses: Losses) -> Iterator[Entry]:
        """What an earlier process left for this model and settings. losses: hear of the others."""
        settings, base = settings_of(llm), base_of(llm)
        self._look()
        for path, file in list(self._files.items()):
            try:
                found = session.beginning(path, llm)
                entry = _entry(found, path, file.st_mtime)
            except session.Damaged as error:
                losses.refuse(str(path), str(error))
                continue
            except BadInput as error:  # of another model, or of another version
                losses.refuse(str(path), str(error), logging.INFO)
                continue
            if entry and "archive" in found.header and is_of(found.note, settings, base):
                entry.settings = settings
            if entry and "archive" in found.header:
                entry.anywhere = archives_all(llm)
            if entry is None or entry.settings != settings:
                losses.refuse(str(path), OTHERS, logging.INFO)
            elif len(entry.tokens) > llm.n_ctx():
                why = f"it has {len(entry.tokens):,} tokens, and the context {llm.n_ctx():,}"
                losses.refuse(str(path), f"{why}: give a larger -c")
            else:
                self._mine[path] = entry
                yield entry

    def write(self, llm: Holder, entry: Entry, n_bytes: int, taken: Callable[[], State]) -> None:
        """Write a conversation of n_bytes, whose state `taken` returns. Older files make room: the
        `path` of their conversations is None then.

        Raises BadInput if there is no room for it, or it cannot be written; an earlier state of it
        may be there then.
        """
        path = self._place(entry)
        self._make_room(n_bytes + entry.tokens.nbytes + _OVERHEAD, path)
        try:
            session.write(llm, path, taken, note_of(llm, entry), is_synced=False)
        except MemoryError:
            raise BadInput("there is no memory to write it") from None
        self._mine[path], entry.path = entry, path
        with suppress(OSError):
            self._files[path] = path.stat()
        self._stamp(path, entry.last_used)

    def read(self, llm: Holder, entry: Entry) -> None:
        """Make a conversation on disk that of `llm`.

        Raises BadInput if it cannot be had; a file that is damaged is removed.
        """
        assert entry.path is not None
        try:
            session.load(llm, entry.path)
        except session.Damaged:
            self.erase(entry)
            raise
        if not np.array_equal(llm.input_ids[: llm.n_tokens], entry.tokens):
            raise BadInput(f"'{entry.path}' holds another conversation by now")

    def knows(self, entry: Entry) -> bool:
        """Whether there is a file of it, or of an earlier state of it."""
        return self._place(entry) in self._mine

    def _place(self, entry: Entry) -> Path:
        return self.folder / f"{entry.id}{SUFFIX}"

    @staticmethod
    def has(entry: Entry) -> bool:
        """Whether there is a file of it, which another process may have removed."""
        if entry.path and not entry.path.exists():
            entry.path = None
        return entry.path is not None

    def stamp(self, entry: Entry) -> None:
        """Its file was used when `entry` was."""
        if entry.path:
            self._stamp(entry.path, entry.last_used)

    def erase(self, entry: Entry) -> None:
        """No file holds it any more, an earlier state of it included."""
        self._remove(self._place(entry))
        entry.path = None

    def _make_room(self, n_bytes: int, first: Path) -> None:
        """n_bytes more fit. first: the file that goes before all others.

        Raises BadInput if they cannot: files of other settings stay.
        """
        if time.monotonic() > self._looked + LOOK_S:
            self._look()
        if self._n_bytes() + n_bytes <= self._limit:
            return
        self._look()
        mine = [path for path in self._files if path in self._mine]
        n_others = self._n_bytes() - sum(self._files[path].st_size for path in mine)
        if n_others + n_bytes > self._limit:
            raise BadInput(
                f"it takes {n_bytes:,} bytes, and files of other settings {n_others:,}: cache_disk"
                f" '{self.folder}' may have {self._limit:,}"
            )
        for path in sorted(mine, key=lambda x: x != first):
            if self._n_bytes() + n_bytes <= self._limit:
                return
            self._remove(path)

    def _n_bytes(self) -> int:
        return sum(found.st_size for found in self._files.values())

    def _look(self) -> None:
        """See what is in the folder: others use it too. What cannot be read is as before."""
        found = {}
        try:
            with os.scandir(self.folder) as files:
                for one in files:
                    if one.name.endswith(SUFFIX):
                        with suppress(FileNotFoundError):
                            found[self.folder / one.name] = one.stat()
        except FileNotFoundError:
            pass
        except OSError:
            return
        self._files = dict(sorted(found.items(), key=lambda x: x[1].st_mtime))
        self._looked = time.monotonic()
        for path in self._mine.keys() - found.keys():
            self._mine.pop(path).path = None

    def _remove(self, path: Path) -> None:
        self._files.pop(path, None)
        entry = self._mine.pop(path, None)
        if entry:
            entry.path = None
        with suppress(OSError):
            path.unlink()

    @staticmethod
    def _stamp(path: Path, when: float) -> None:
        with suppress(OSError):
            os.utime(path, (when, when))


def note_of(llm: Holder, entry: Entry) -> dict[str, Any]:
    """What a file's note says of a conversation."""
    return {
        "settings": entry.settings,
        "least": entry.least,
        "name": entry.name,
        "is_boundary": entry.is_boundary,
        "turns": sorted(entry.turns.items()),
        "base": base_of(llm),
    }


def is_of(note: Any, settings: str, base: str) -> bool:
    """Whether a prompt may go on from a conversation whose file says this. base: see
    `edgekv.conversation.settings_digest.base_of`.
    """
    if not isinstance(note, dict):
        return False
    return note.get("settings") == settings or (base != "" and note.get("base") == base)


def _is_turn(x: Any) -> bool:
    return isinstance(x, list) and [type(n) for n in x] == [int, int] and 0 <= x[1] < x[0]


def _entry(found: session.Beginning, path: Path, used: float) -> Entry | None:
    """The conversation in a file. None if its note is not one of ours."""
    note, n = found.note, len(found.tokens)
    if not isinstance(note, dict) or set(note) - NEWER != NOTE:
        return None
    least, name, turns = note["least"], note["name"], note.get("turns", [])
    if (
        n == 0
        or type(least) is not int
        or not 0 <= least <= n
        or not isinstance(name, (str, type(None)))
        or not (isinstance(turns, list) and all(map(_is_turn, turns)))
    ):
        return None
    return Entry(
        tokens=found.tokens.astype(np.int32),
        settings=str(note["settings"]),
        least=least,
        name=name,
        is_boundary=note["is_boundary"] is True,
        id=path.name.removesuffix(SUFFIX),
        last_used=used,
        path=path,
        turns={end: begin for end, begin in turns},
    )
