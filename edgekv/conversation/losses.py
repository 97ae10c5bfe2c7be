"""What becomes of conversations that cannot stay: one line in the log each, and a count."""

from __future__ import annotations

import logging
from collections import Counter

from edgekv.conversation.talk import Entry

log = logging.getLogger("edgekv")

DROPPED, UNWRITTEN, READ_AGAIN, REFUSED = "dropped", "unwritten", "read_again", "refused"
REPLACED = "replaced"
KINDS = {
    DROPPED: "is forgotten",
    UNWRITTEN: "is not on disk",
    READ_AGAIN: "is read again",
    REFUSED: "is left out",
    REPLACED: "is part of another one",
}


class Losses:
    """Counts and logs conversations that are lost, with the reason.

    counts: of each of KINDS. is_usual: nothing is to be kept, so there is nothing to say.
    """

    def __init__(self, is_usual: bool) -> None:
        self.counts = Counter(dict.fromkeys(KINDS, 0))
        self._is_usual = is_usual

    def drop(self, entry: Entry, why: str, level: int = logging.WARNING) -> None:
        """It is neither in memory nor on disk any more. A beginning of others is no loss."""
        if not entry.is_boundary:
            self._say(DROPPED, entry, why, logging.DEBUG if self._is_usual else level)

    def unwritten(self, entry: Entry, why: str) -> None:
        """A later process will not find it."""
        if not entry.is_boundary:
            self._say(UNWRITTEN, entry, why, logging.WARNING)

    def read_again(self, entry: Entry, why: str) -> None:
        """It was there, but cannot be had."""
        self._say(READ_AGAIN, entry, why, logging.WARNING)

    def part_of(self, entry: Entry, other: Entry) -> None:
        """Nothing is lost, whenever a prompt is asked again: another one has all of its tokens."""
        self._say(REPLACED, entry, other.id, logging.DEBUG)

    def refuse(self, file: str, why: str, level: int = logging.WARNING) -> None:
        """The conversation in a file cannot be had; the file stays as it is."""
        self._log(REFUSED, f"conversation in '{file}'", why, level)

    def _say(self, kind: str, entry: Entry, why: str, level: int) -> None:
        self._log(kind, f"conversation {entry.id} ({len(entry.tokens)} tokens)", why, level)

    def _log(self, kind: str, what: str, why: str, level: int) -> None:
        self.counts[kind] += 1
        log.log(level, "edgekv: %s %s: %s", what, KINDS[kind], why)
