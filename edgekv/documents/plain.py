"""A file of text, read within limits."""

from __future__ import annotations

import stat
from typing import BinaryIO

from edgekv.base.console import say
from edgekv.base.files import expanded
from edgekv.errors import BadInput

_NOT_IN_TEXT = bytes({*range(0x20), 0x7F} - set(b"\t\n\f\r\x1b"))

DOCUMENT_MAX = 64 * 2**20
"""Bytes of a text that are read. The longest contexts hold less."""
PDF = b"%PDF-"


def read_document(path: str, may_be_pipe: bool = False) -> str:
    """The text of a file, as `decode` reads it. Raises BadInput as that and `read_file` do."""
    return decode(read_file(path, may_be_pipe), f"'{path}'")


def read_file(path: str, may_be_pipe: bool = False) -> bytes:
    """A whole file.

    may_be_pipe: a named pipe is waited for, as a shell's <(command) needs it.
    Raises BadInput for what is missing, no file, or too large.
    """
    try:
        place = expanded(path)
        mode = place.stat().st_mode
        if stat.S_ISDIR(mode):
            raise BadInput(f"'{path}' is a directory; name a text file in it")
        if not stat.S_ISREG(mode) and not (may_be_pipe and stat.S_ISFIFO(mode)):
            raise BadInput(f"'{path}' is a pipe or a device; name a text file")
        with place.open("rb") as file:
            return read_bounded(file, f"'{path}'")
    except FileNotFoundError:
        raise BadInput(f"there is no file '{path}'; check the name") from None
    except BadInput:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"'{path}' cannot be read ({reason})") from None


def read_bounded(file: BinaryIO, what: str) -> bytes:
    """All bytes of a file. Raises BadInput, about `what`, if there are more than any context
    holds; a PDF, which has more than its text, may have 16 times as many.
    """
    data, limit = file.read(DOCUMENT_MAX + 1), DOCUMENT_MAX
    if data.startswith(PDF):
        limit *= 16
        data += file.read(limit + 1 - len(data))
    if len(data) > limit:
        raise too_long(what)
    return data


def too_long(what: str) -> BadInput:
    limit = DOCUMENT_MAX // 2**20
    return BadInput(f"{what} has more than {limit} MiB, which no context holds; give a part of it")


def decode(data: bytes, what: str) -> str:
    """`data` as text without its last line end; `what` names it in messages.

    UTF-8, or UTF-16 with a byte order mark; else it is guessed, and a line says so. Raises BadInput
    if it is no text or empty.
    """
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        text = _guessed(data, what) if encoding == "utf-8-sig" else "\0"
    if "\0" in text:
        raise BadInput(
            f"{what} is no text in UTF-8; convert it first (pdftotext, pandoc, iconv -t utf-8)"
        )
    text = text.replace("\r\n", "\n").removesuffix("\n")
    if not text.strip():
        raise BadInput(f"{what} is empty; there is nothing to read")
    return text


def _guessed(data: bytes, what: str) -> str:
    """Text that is not all UTF-8: damaged, or Latin-1 as Windows has it. NUL where it is none."""
    if len(data.translate(None, _NOT_IN_TEXT)) < len(data):
        return "\0"
    text = data.decode("utf-8", "replace")
    n_bad = text.count("\ufffd")
    n_letters = len(text) - len(text.encode("ascii", "ignore")) - n_bad
    if n_letters > n_bad:
        say(f"{what} has {n_bad:,} places that are no UTF-8: they are read as \ufffd")
        return text
    say(
        f"{what} is no UTF-8 and is read as Latin-1; if letters are wrong, convert it first"
        " (iconv -t utf-8)"
    )
    return data.decode("cp1252", "replace")
