"""Text as a terminal can show it."""

from __future__ import annotations

# What is no text but could steer a terminal: all control characters but newline and tab.
_CONTROL = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])
del _CONTROL[ord("\n")], _CONTROL[ord("\t")]


def encodable(text: str) -> str:
    """`text` with a replacement mark for bytes of the command line that are no UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def printable(text: str) -> str:
    """`text` without the control characters that could steer a terminal."""
    return text.translate(_CONTROL)


def one_line(text: str) -> str:
    """`text` with '?' for line ends and for all else that could steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)
