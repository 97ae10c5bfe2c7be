"""How a prompt that is read shares the model's time with other answers."""

from __future__ import annotations

import time

WORTH = 10
"""How many times as long as it takes to change conversations a turn lasts at least."""
MOST_S = 1.0
"""Seconds that others have at a time at most, but for the rest of a step."""


class Share:
    """Of one prompt. Others have the model as long as its reader had it just before; where a step
    of theirs took longer, so much longer the reader has it next.
    """

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        """When the reader went on."""
        self._owed_s = self._change_s = 0.0

    def others_s(self) -> float:
        """Seconds that others may have now; 0 while it is not worth the change."""
        least = WORTH * self._change_s
        left = time.perf_counter() - self._begin - self._owed_s
        return min(left, max(MOST_S, least)) if left > least else 0.0

    def lent(self, all_s: float, used_s: float) -> None:
        """Others had the model: all_s seconds, of which they used used_s. The rest took the change
        to another conversation and back.
        """
        now = time.perf_counter()
        had_s = now - all_s - self._begin
        self._owed_s = max(self._owed_s + all_s - had_s, 0.0)
        self._begin, self._change_s = now, all_s - used_s
