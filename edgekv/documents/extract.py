"""The text in a document: plain text, Markdown, HTML or PDF, from a file or a pipe."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

from edgekv.documents import pdf
from edgekv.documents.plain import PDF, decode, read_file
from edgekv.documents.watch import Watch
from edgekv.errors import BadInput

HTML = (".html", ".htm", ".xhtml")
_SILENT = {"head", "script", "style", "template", "noscript"}
_RAW = {tag: re.compile(f"</{tag}", re.I) for tag in ("script", "style")}
"""What ends the content of tags in which nothing else is a tag."""
_BLOCKS = {
    *("address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "figcaption"),
    *("figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main"),
    *("nav", "ol", "p", "pre", "section", "table", "tr", "ul"),
}
_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?\s*([\w.:-]{1,40})""", re.I)
_PAGE = re.compile(r"\s*(<!doctype html|<html)\b", re.I)
# Whatever begins matches, if need be to the end of the page: nothing is looked at many times.
_TOKEN = re.compile(
    r"""(?six)
    <!--.*?(?:-->|\Z)
    | <(?P<end>/?)(?P<tag>[a-z][^\s/>]*)(?P<rest>(?:[^>=]+|=\s*"[^"]*"|=\s*'[^']*'|=)*)(?:>|\Z)
    | <[!?/][^>]*(?:>|\Z)
    | (?P<text>[^<]+|<)
    """
)


def document_text(path: str, may_be_pipe: bool = False) -> str:
    """The text of a file: a PDF, HTML by the end of its name, or else as it is.

    may_be_pipe: a named pipe is waited for, as a shell's <(command) needs it.
    Raises BadInput if it cannot be read, is empty, holds no text, or takes too long.
    """
    return text_of(read_file(path, may_be_pipe), f"'{path}'", Path(path).suffix.lower())


def text_of(data: bytes, what: str, suffix: str = "") -> str:
    """The text of a file's bytes; `what` names it in messages. suffix: of its name; without one
    HTML is told by how it begins. Raises as `document_text`.
    """
    if suffix == ".pdf" or data.startswith(PDF):
        return pdf.text_of(data, what)
    if suffix in HTML:
        return _html(_page(data, what), what)
    text = decode(data, what)
    return _html(text, what) if not suffix and _PAGE.match(text) else text


def _page(data: bytes, what: str) -> str:
    """A page in UTF-8, or in the encoding that it names, or in one that is guessed."""
    found = _CHARSET.search(data[:4096])
    try:
        data.decode()
    except UnicodeDecodeError:
        try:
            return data.decode(found[1].decode("ascii")) if found else decode(data, what)
        except (LookupError, ValueError):
            pass
    return decode(data, what)


def _html(page: str, what: str) -> str:
    with Watch(what) as watch:
        reader, at = _Text(), 0
        while at < len(page):
            at = reader.take(page, at)
            watch(at, len(page))
    text = reader.text()
    if not text:
        raise BadInput(f"{what} has no text in it")
    return text


class _Text:
    """Collects what a reader sees: a line for each block, cells of a table apart."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._silent: list[str] = []
        self._n_pre = 0

    def take(self, page: str, at: int) -> int:
        """Take the tag or the text at a place. Returns where it ends."""
        found = _TOKEN.match(page, at)
        assert found is not None  # any character begins something
        tag = (found["tag"] or "").lower()
        if found["text"]:
            self._add(_unescaped(found["text"]))
        elif found["end"]:
            self._end(tag)
        elif tag and found["rest"].endswith("/"):
            self._break(tag)
        elif tag:
            self._begin(tag)
            if tag in _RAW:
                close = _RAW[tag].search(page, found.end())
                return close.start() if close else len(page)
        return found.end()

    def _begin(self, tag: str) -> None:
        if tag == "body":
            self._silent.clear()  # of a head without an end
        if tag in _SILENT and tag not in self._silent:
            self._silent.append(tag)
        self._n_pre += tag == "pre"
        self._break(tag)

    def _end(self, tag: str) -> None:
        if tag in self._silent:
            del self._silent[self._silent.index(tag) :]
        self._n_pre = max(self._n_pre - (tag == "pre"), 0)
        self._break(tag)

    def _add(self, text: str) -> None:
        if self._silent:
            return
        if not self._n_pre:
            text = re.sub(r"\s+", " ", text)
            text = text.lstrip() if self._at_line_begin() else text
        if text:
            self._pieces.append(text)

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


def _unescaped(text: str) -> str:
    try:
        return unescape(text)
    except ValueError:  # a number of thousands of digits
        return text
