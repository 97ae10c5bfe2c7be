"""Hidden states of a conversation's last tokens, which a model's own heads go on from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgekv.native.mtp import WINDOW


class HiddenStates:
    """Those of the last tokens, to WINDOW. begin: the first position; rows: f32 [n_embd]."""

    def __init__(self) -> None:
        self.begin = 0
        self.rows: list[NDArray[np.float32]] = []

    def add(self, begin: int, rows: NDArray[np.float32]) -> None:
        """Those of tokens that were read at `begin` and behind it, float32 [n, n_embd]."""
        n_before = begin - self.begin
        if not 0 <= n_before <= len(self.rows):
            self.begin, n_before = begin, 0
        self.rows[n_before:] = rows
        n_gone = max(len(self.rows) - WINDOW, 0)
        del self.rows[:n_gone]
        self.begin += n_gone

    @property
    def n_bytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    def copy(self) -> HiddenStates:
        """Another one, of a conversation that goes on otherwise."""
        other = HiddenStates()
        other.begin, other.rows = self.begin, self.rows.copy()
        return other

    def between(self, begin: int, end: int) -> NDArray[np.float32] | None:
        """float32 [end - begin, n_embd] of tokens at these positions; None if one is missing."""
        found = self.rows[max(begin - self.begin, 0) : max(end - self.begin, 0)]
        return np.stack(found) if found and len(found) == end - begin else None
