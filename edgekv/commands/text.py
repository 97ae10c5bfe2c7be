"""Text in and out: reading a document, and showing a model's text on a terminal."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import BinaryIO

from edgekv.errors import BadInput

# What is no text but could steer a terminal: all control characters but newline and tab.
_CONTROL = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])
del _CONTROL[ord("\n")], _CONTROL[ord("\t")]


DOCUMENT_MAX = 64 * 2**20
"""Bytes of a text that are read. The longest contexts hold less."""


def read_document(path: str, may_be_pipe: bool = False) -> str:
    """The text of a file without its last line end. UTF-8, or UTF-16 with a byte order mark.

    may_be_pipe: a named pipe is waited for, as a shell's <(command) needs it.
    Raises BadInput for what is missing, no file, empty, too large, or no text.
    """
    try:
        place = expanded(path)
        mode = place.stat().st_mode
        if stat.S_ISDIR(mode):
            raise BadInput(f"'{path}' is a directory; name a text file in it")
        if not stat.S_ISREG(mode) and not (may_be_pipe and stat.S_ISFIFO(mode)):
            raise BadInput(f"'{path}' is a pipe or a device; name a text file")
        with place.open("rb") as file:
            data = read_bounded(file, f"'{path}'")
    except FileNotFoundError:
        raise BadInput(f"there is no file '{path}'; check the name") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"'{path}' cannot be read ({reason})") from None
    return decode(data, f"'{path}'")


def expanded(path: str) -> Path:
    """`path` with the home folder in place of ~. Raises BadInput if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise BadInput(f"'{path}' names a user whom this machine does not have") from None


def read_bounded(file: BinaryIO, what: str) -> bytes:
    """All bytes of a file. Raises BadInput, about `what`, if there are more than any context
    holds.
    """
    data = file.read(DOCUMENT_MAX + 1)
    if len(data) > DOCUMENT_MAX:
        raise too_long(what)
    return data


def too_long(what: str) -> BadInput:
    limit = DOCUMENT_MAX // 2**20
    return BadInput(f"{what} has more than {limit} MiB, which no context holds; give a part of it")


def decode(data: bytes, what: str) -> str:
    """`data` as text without its last line end; `what` names it in an error. Raises BadInput if it
    is none or empty.
    """
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise BadInput(
            f"{what} is no text in UTF-8; convert it first (pdftotext, pandoc, iconv -t utf-8)"
        )
    text = text.replace("\r\n", "\n").removesuffix("\n")
    if not text.strip():
        raise BadInput(f"{what} is empty; there is nothing to read")
    return text


def encodable(text: str) -> str:
    """`text` with a replacement mark for what came in as bytes that are no UTF-8 (from the command
    line).
    """
    return text.encode("utf-8", "replace").decode("utf-8")


def printable(text: str) -> str:
    """`text` without the control characters that could steer a terminal."""
    return text.translate(_CONTROL)
