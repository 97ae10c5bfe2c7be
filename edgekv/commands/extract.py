"""The text in a document: plain text, Markdown, HTML or PDF."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from edgekv.commands.text import DOCUMENT_MAX, decode, expanded, read_document, too_long
from edgekv.errors import BadInput

HTML = (".html", ".htm", ".xhtml")
_SILENT = {"head", "script", "style", "template", "noscript"}
_BLOCKS = {
    *("address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "figcaption"),
    *("figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main"),
    *("nav", "ol", "p", "pre", "section", "table", "tr", "ul"),
}
_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?\s*([\w.:-]{1,40})""", re.I)


def document_text(path: str) -> str:
    """The text of a file, by the end of its name: .pdf, .html, or else as it is.

    Raises BadInput if it cannot be read, is empty, or holds no text.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".pdf":
        return _pdf(path)
    if suffix in HTML:
        return _html(path)
    return read_document(path)


# ---- HTML


def _html(path: str) -> str:
    data = _bytes(path)
    found = _CHARSET.search(data[:4096])
    try:
        page = decode(data, f"'{path}'")
    except BadInput:
        if not found:
            raise
        try:
            page = data.decode(found[1].decode("ascii"))
        except (LookupError, ValueError):
            raise BadInput(f"'{path}' is not in the encoding that it names") from None
    parser = _Text()
    parser.feed(page)
    parser.close()
    text = parser.text()
    if not text:
        raise BadInput(f"'{path}' has no text in it")
    return text


class _Text(HTMLParser):
    """Collects what a reader sees: a line for each block, cells of a table apart."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[str] = []
        self._silent: list[str] = []
        self._n_pre = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in _SILENT:
            self._silent.append(tag)
        self._n_pre += tag == "pre"
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._silent:
            del self._silent[self._silent.index(tag) :]
        self._n_pre = max(self._n_pre - (tag == "pre"), 0)
        self._break(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if self._silent:
            return
        if not self._n_pre:
            data = re.sub(r"\s+", " ", data)
            data = data.lstrip() if self._at_line_begin() else data
        if data:
            self._pieces.append(data)

    def _break(self, tag: str) -> None:
        if tag in _BLOCKS:
            self._pieces.append("\n")
        elif tag in ("td", "th") and not self._at_line_begin():
            self._pieces.append("\t")

    def _at_line_begin(self) -> bool:
        return not self._pieces or self._pieces[-1].endswith(("\n", "\t"))

    def text(self) -> str:
        lines = "\n".join(line.rstrip() for line in "".join(self._pieces).split("\n"))
        return re.sub(r"\n{3,}", "\n\n", lines).strip("\n")


# ---- PDF


def _pdf(path: str) -> str:
    try:
        from pypdf import PdfReader
    except ImportError:
        raise BadInput(
            f"reading '{path}' needs pypdf: pip install 'edgekv[pdf]', or give its text"
        ) from None
    import io

    data = _bytes(path, 16 * DOCUMENT_MAX)
    try:
        pages = [page.extract_text() for page in PdfReader(io.BytesIO(data)).pages]
    except Exception as error:  # of a damaged or encrypted file, of any kind
        why = " ".join(str(error).split()) or type(error).__name__
        raise BadInput(f"'{path}' is no PDF that can be read ({why})") from None
    text = "\n\n".join(page.strip() for page in pages if page.strip())
    text = text.encode("utf-8", "replace").decode("utf-8")
    if not text:
        raise BadInput(f"'{path}' has no text in it, perhaps scanned pages; read it with OCR first")
    if len(text.encode()) > DOCUMENT_MAX:
        raise too_long(f"'{path}'")
    return text


def _bytes(path: str, limit: int = DOCUMENT_MAX) -> bytes:
    """A whole file. Raises BadInput if it cannot be read, or has more than `limit` bytes."""
    try:
        place = expanded(path)
        if not place.is_file():
            raise BadInput(f"there is no file '{path}'; check the name")
        with place.open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"'{path}' cannot be read ({reason})") from None
    if len(data) > limit:
        raise too_long(f"'{path}'")
    return data
