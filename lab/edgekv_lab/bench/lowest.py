"""The lowest of a number that a thread looks at again and again: free memory of devices, which keep
no peak themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

PERIOD_S = 0.01


class Lowest:
    """Use as a context manager, around what may take memory. number: looked at every 10 ms, at the
    beginning and at the end; 0 says nothing.
    """

    def __init__(self, number: Callable[[], int]) -> None:
        self._number = number
        self._done = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self.value = number()

    def __enter__(self) -> Lowest:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(PERIOD_S):
            self._look()

    def _look(self) -> None:
        self.value = min(self.value, self._number() or self.value)
