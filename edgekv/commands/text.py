"""Text in and out: reading a document, and showing a model's text on a terminal."""

from __future__ import annotations

from pathlib import Path

from edgekv.errors import BadInput

# What is no text but could steer a terminal: all control characters but newline and tab.
_CONTROL = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])
del _CONTROL[ord("\n")], _CONTROL[ord("\t")]


def read_document(path: str) -> str:
    """The text of a file without its last line end. UTF-8, or UTF-16 with a byte order mark.

    Raises BadInput for what is missing, no file, empty, or no text.
    """
    try:
        data = Path(path).expanduser().read_bytes()
    except FileNotFoundError:
        raise BadInput(f"there is no file '{path}'; check the name") from None
    except IsADirectoryError:
        raise BadInput(f"'{path}' is a directory; name a text file in it") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInput(f"'{path}' cannot be read ({getattr(error, 'strerror', None) or error})") from None
    return decode(data, f"'{path}'")


def decode(data: bytes, what: str) -> str:
    """`data` as text without its last line end; `what` names it in an error. Raises BadInput if it is none or empty."""
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise BadInput(f"{what} is no text in UTF-8; convert it first (pdftotext, pandoc, iconv -t utf-8)")
    text = text.replace("\r\n", "\n").removesuffix("\n")
    if not text.strip():
        raise BadInput(f"{what} is empty; there is nothing to read")
    return text


def encodable(text: str) -> str:
    """`text` with a replacement mark for what came in as bytes that are no UTF-8 (from the command line)."""
    return text.encode("utf-8", "replace").decode("utf-8")


def printable(text: str) -> str:
    """`text` without the control characters that could steer a terminal."""
    return text.translate(_CONTROL)
