"""Watches how long it takes to find the text in a document: a bar, and an end."""

from __future__ import annotations

import time
from collections.abc import Callable

from edgekv.base.console import ReadingBar
from edgekv.errors import BadInput

SHOWN_S = 1.0
"""Seconds after which there is a bar."""
MOST_S = 120.0


class Watch:
    """`watch(done, total)` between two steps, in a `with` block. what: the document, for messages.

    Raises BadInput once it takes more than MOST_S.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock, self._begin = what, clock, clock()
        self._bar: ReadingBar | None = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *details: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        elapsed = self._clock() - self._begin
        if elapsed > MOST_S:
            raise BadInput(
                f"finding the text in {self._what} takes more than {MOST_S:g} s; give its text, or"
                " a part of it"
            )
        if elapsed > SHOWN_S:
            self._bar = self._bar or ReadingBar()
            self._bar(done, total)
