"""How the time of a long prompt is shared: others get at most as much as its reader has had."""

from __future__ import annotations

import time
from collections.abc import Callable

WORTH = 10
"""How many times as long as changing conversations takes others are let in at least."""
MOST_S = 1.0
"""Seconds that others have at a time: what nobody used does not add up."""


class Share:
    """The time since a prompt began to be read."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._begin = clock, clock()
        self._lent = self._change_s = 0.0

    def until(self) -> float | None:
        """The clock's time until which others may go on now; None: it is the reader's turn."""
        now = self._clock()
        left = now - self._begin - 2 * self._lent
        if left <= WORTH * self._change_s:
            return None
        return now + max(min(left, MOST_S), WORTH * self._change_s)

    def lent(self, begin: float, used_s: float) -> None:
        """Others were let in at `begin`, and have left; they used used_s seconds of that time."""
        self._lent += self._clock() - begin
        self._change_s = self._clock() - begin - used_s
