"""The expression of --ignore-prefix."""

from __future__ import annotations

import regex

from edgekv.errors import BadInput

CHARACTERS, SECONDS = 1000, 0.05
"""What an expression sees of a text at most, and how long it may take: some take for ever."""


class Pattern:
    """Raises BadInput for an expression that cannot be used."""

    def __init__(self, expression: str) -> None:
        try:
            self._compiled = regex.compile(expression)
        except (regex.error, RecursionError, OverflowError) as error:
            reason = " ".join(str(error).split())
            raise BadInput(f"'{expression}' is no regular expression: {reason}") from None

    def at_front(self, text: str) -> str:
        """What matches at the beginning of a text; nothing if it takes too long."""
        try:
            found = self._compiled.match(text[:CHARACTERS], timeout=SECONDS)
        except TimeoutError:
            return ""
        return str(found.group()) if found else ""
