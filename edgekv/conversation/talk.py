"""A conversation that waits: in memory, in a file, or both; and how far it can be taken back."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgekv.base.beginnings import n_shared
from edgekv.conversation.parked import Parked, Reach

N_TURNS = 16
"""Prompts of one conversation of which it is known where their reading began."""


@dataclass(frozen=True)
class Talk:
    """A conversation of a pool, as `Conversations.list` shows it.

    n_bytes: in memory, 0 for one that is on disk alone; last_used: seconds since 1970; is_current:
    the model goes on with it; on_disk: a file holds all of it.
    """

    id: str
    name: str | None
    n_tokens: int
    n_bytes: int
    last_used: float
    is_current: bool
    on_disk: bool


@dataclass(frozen=True, eq=False)
class End:
    """Logits float32 [n_vocab] behind these tokens: their answer begins at once."""

    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]


@dataclass(eq=False)
class Entry:
    """A conversation, or the beginning of some (`is_boundary`), that a prompt may go on from.

    parked and path are both None for the conversation that the model holds at the moment.
    """

    tokens: NDArray[np.int32]
    settings: str
    """The digest of the cache's settings, see `edgekv.conversation.settings_digest`."""
    least: int = 0
    """Fewest tokens that the conversation can be taken back to."""
    mark: int = -1
    """A number of tokens below `least` that the conversation can go back to as well; -1: none."""
    anywhere: bool = False
    """The conversation goes back to any number, below `least` by its archive."""
    name: str | None = None
    is_boundary: bool = False
    is_kept: bool = False
    """The conversation stays as it is, whatever goes on from it."""
    is_under_way: bool = False
    """Its answer is not complete."""
    is_held: bool = False
    """Its answer is being written beside others: it waits in memory, however much it takes."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    last_used: float = 0.0
    parked: Parked | None = None
    path: Path | None = None
    """A file with exactly these tokens."""
    prompt: End | None = None
    """The end of the conversation's last prompt."""
    last: End | None = None
    """The end of all its tokens, while the conversation waits."""
    turns: dict[int, int] = field(default_factory=dict)
    """Of its last prompts by their numbers of tokens: behind how many each was read, or an end of
    it whose rows are rounded later.
    """

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that the conversation takes."""
        ends = sum(x.logits.nbytes for x in (self.prompt, self.last) if x)
        return self.parked.n_bytes + self.tokens.nbytes + ends if self.parked else 0

    @property
    def n_bytes_archive(self) -> int:
        """Of disk, while it waits in memory."""
        return self.parked.n_bytes_archive if self.parked else 0

    def leave_memory(self) -> None:
        """A file is all that is left; it knows of no mark and no logits."""
        self.parked = self.prompt = self.last = None
        self.mark = -1

    def set_reach(self, reach: Reach) -> None:
        self.least, self.mark, self.anywhere = reach.least, reach.mark, reach.anywhere

    @property
    def first(self) -> int:
        """Fewest tokens that it can be taken back to by any way."""
        return 0 if self.anywhere else self.least

    def end_of(self, tokens: NDArray[np.int32]) -> End | None:
        """The logits behind a prompt, if they are there, and it can be taken back to the prompt."""
        n = len(tokens)
        if self.least <= n <= len(self.tokens) and n_shared(self.tokens, tokens) == n:
            for end in (self.last, self.prompt):
                if end and np.array_equal(end.tokens, tokens):
                    return end
        return None

    def reachable(self, tokens: NDArray[np.int32]) -> int:
        """How many tokens of a prompt need not be read behind this conversation. The last one is,
        unless its logits are there: the answer begins with them.
        """
        if self.end_of(tokens):
            return len(tokens)
        begin = self.begin_of(tokens)
        if begin is not None:
            return begin  # its last token alone would get other logits
        shared = min(n_shared(tokens, self.tokens), len(tokens) - 1)
        if shared >= max(self.first, 1):
            return shared
        return self.mark if 0 < self.mark <= shared else 0

    def begin_of(self, tokens: NDArray[np.int32]) -> int | None:
        """Where this prompt was read from, if it is one of its last and can be read again."""
        begin = self.turns.get(len(tokens))
        if begin is None or n_shared(tokens, self.tokens) < len(tokens) - 1:
            return None
        return begin if begin == 0 or self.first <= begin else None

    def has_turn(self, begin: int, end: int) -> None:
        """A prompt that makes it `end` tokens is read behind `begin` of them."""
        self.turns[end] = begin
        for old in sorted(self.turns)[:-N_TURNS]:
            del self.turns[old]

    def covers(self, other: Entry) -> bool:
        """Whether it can be taken back to whatever `other` can be taken back to."""
        return self.least <= other.least and self.begins_with(other)

    @property
    def may_go(self) -> bool:
        """Whether it is only kept for its tokens."""
        return not (self.is_boundary or self.is_kept or self.is_under_way or self.name)

    def has_all_of(self, other: Entry) -> bool:
        """Whether it is another one, of the same settings, that begins with all tokens of it."""
        return self is not other and self.settings == other.settings and self.begins_with(other)

    def begins_with(self, other: Entry) -> bool:
        return n_shared(self.tokens, other.tokens) == len(other.tokens)
