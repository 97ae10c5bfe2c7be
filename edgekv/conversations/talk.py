"""A conversation that waits: in memory, in a file, or both; and how far it can be taken back."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgekv.session.parked import Parked, Reach


@dataclass(frozen=True)
class Talk:
    """A conversation of a pool, as `Conversations.list` shows it.

    n_bytes: of memory, 0 for one that is on disk alone; last_used: seconds since 1970; is_current:
    it is the one that the model goes on with; on_disk: a file holds all of it.
    """

    id: str
    name: str | None
    n_tokens: int
    n_bytes: int
    last_used: float
    is_current: bool
    on_disk: bool


@dataclass(eq=False)
class Entry:
    """A conversation, or the beginning of some (`is_boundary`), that a prompt may go on from.

    parked and path are both None for the conversation that the model holds at the moment.
    """

    tokens: NDArray[np.int32]
    settings: str
    """Of the cache, see `edgekv.conversations.identity`."""
    least: int = 0
    """Fewest tokens that it can be taken back to."""
    mark: int = -1
    """One number of tokens below `least` that it can be taken back to as well; -1: there is none"""
    name: str | None = None
    is_boundary: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    last_used: float = 0.0
    parked: Parked | None = None
    path: Path | None = None
    """A file with exactly these tokens."""

    @property
    def n_bytes(self) -> int:
        """Of memory."""
        return self.parked.n_bytes + self.tokens.nbytes if self.parked else 0

    def set_reach(self, reach: Reach) -> None:
        self.least, self.mark = reach.least, reach.mark

    def reachable(self, tokens: NDArray[np.int32]) -> int:
        """How many tokens of a prompt need not be read behind this conversation. The last one
        always is: the answer begins with its logits.
        """
        shared = min(n_shared(tokens, self.tokens), len(tokens) - 1)
        if shared >= max(self.least, 1):
            return shared
        return self.mark if 0 < self.mark <= shared else 0

    def covers(self, other: Entry) -> bool:
        """Whether it can be taken back to whatever `other` can be taken back to."""
        return self.least <= other.least and self.begins_with(other)

    def begins_with(self, other: Entry) -> bool:
        return n_shared(self.tokens, other.tokens) == len(other.tokens)


def n_shared(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of what two sequences of tokens have in common at the beginning."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
