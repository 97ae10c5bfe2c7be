"""Words kept whole at a terminal's edge."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

FENCE = "```"
_TOKENS = re.compile(r"\n|[^\S\n]+|\S+")


class Wrap:
    """Breaks lines between words in a text that comes in pieces. Code between fences stays as it
    is.

    width: columns of the terminal, asked anew for each word.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._blanks = self._word = ""
        self._is_code = False

    def feed(self, piece: str) -> str:
        """Returns what can be shown by now: all but a word that may go on."""
        text, self._word = self._word + piece, ""
        shown = ""
        for match in _TOKENS.finditer(text):
            if match[0] == "\n":
                shown += "\n"
                self._column, self._blanks = 0, ""
            elif match[0].isspace():
                self._blanks += match[0]
            elif match.end() == len(text):
                self._word = match[0]
            else:
                shown += self._place(match[0])
        if is_wide(self._word) or columns(self._word) > self._width():
            shown += self.end()
        return shown

    def end(self) -> str:
        """Returns the word that was held back."""
        word, self._word = self._word, ""
        return self._place(word) if word else ""

    def _place(self, word: str) -> str:
        """A word with what stands in front of it: its blanks, or a line break."""
        blanks, self._blanks = self._blanks, ""
        if self._column == 0 and word.startswith(FENCE):
            self._is_code = not self._is_code
        n, n_blanks = columns(word), len(blanks.expandtabs())
        width, is_breakable = max(self._width(), 1), is_wide(word) or self._is_code
        if self._column and not is_breakable and self._column + n_blanks + n > width:
            blanks, self._column, n_blanks = "\n", 0, 0
        end = self._column + n_blanks + n
        # where the terminal itself broke the line
        self._column = end if end <= width else end % width
        return blanks + word


def is_wide(text: str) -> bool:
    """Whether it has letters of a script without blanks, which may be broken anywhere."""
    return columns(text) > len(text)


def columns(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    from prompt_toolkit.utils import get_cwidth

    return get_cwidth(text)


def lines(text: str, width: int | None) -> str:
    """A finished text with line breaks between words; width: columns, None for no breaks."""
    if width is None:
        return text
    return "\n".join(
        "\n".join(textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False))
        or line
        for line in text.split("\n")
    )
