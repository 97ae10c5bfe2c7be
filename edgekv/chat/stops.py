"""From bytes of tokens to text: whole characters, and nothing of a text at which to stop."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


def held(text: str, words: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `words`."""
    longest = max(map(len, words), default=0)
    return next(
        (
            n
            for n in range(min(longest - 1, len(text)), 0, -1)
            if any(word.startswith(text[-n:]) for word in words)
        ),
        0,
    )


class Stops:
    """The text of an answer up to the first of some texts."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.found: str | None = None
        """The text that ended the answer."""

    def feed(self, data: bytes, final: bool = False) -> str:
        """The bytes of a token come in; returns what is certain by now, with `final` all."""
        text = self._held + self._decoder.decode(data, final)
        at, stop = min(
            ((text.find(stop), stop) for stop in self._stops if stop in text), default=(-1, None)
        )
        if stop is not None:
            self.found, self._held = stop, ""
            return text[:at]
        n = 0 if final else held(text, self._stops)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]
