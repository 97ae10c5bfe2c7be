"""How many threads write tokens: fewer while other processes want the same cores.

llama.cpp's threads wait for each other in loops. Two processes that each have as many threads as
there are cores wait for threads that are not running: on two cores each writes a quarter of the
tokens per second that it writes alone, where half would be fair.
"""

from __future__ import annotations

import os
from collections.abc import Callable

EVERY = 16
"""Tokens between two looks at the machine."""


def runnable() -> int | None:
    """Threads of all processes that run or wait for a core; None where the system does not say."""
    try:
        with open("/proc/loadavg", encoding="ascii") as f:
            return int(f.read().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return None


class Pace:
    """Chooses the number of threads that write tokens.

    n_most: threads on a machine that does nothing else.
    """

    def __init__(
        self,
        n_most: int,
        count: Callable[[], int | None] = runnable,
        n_cores: int = os.cpu_count() or 1,
    ) -> None:
        self._n_most, self._count, self._n_cores = n_most, count, n_cores
        self.n = n_most
        """Threads for the next tokens."""
        self._was_free = False
        self._n_tokens = 0

    def look(self) -> bool:
        """Look at the machine. Whether `n` is another one now.

        Own threads may wait in a loop or sleep: at most n of those that are runnable are own.
        More threads are taken when the cores were free twice in a row.
        """
        there = self._count()
        if there is None:
            return False
        others = max(there - self.n, 0)
        wish = max(1, min(self._n_most, self._n_cores - others))
        is_free = wish > self.n
        wait, self._was_free = is_free and not self._was_free, is_free
        if wait or wish == self.n:
            return False
        self.n = wish
        return True

    def keep(self, set_n_threads: Callable[[int], None]) -> None:
        """Called before each token: now and then, look at the machine, and say if the next tokens
        are to be written by another number of threads.
        """
        if self._n_tokens % EVERY == 0 and self.look():
            set_n_threads(self.n)
        self._n_tokens += 1
