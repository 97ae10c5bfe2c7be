"""The text in a PDF."""

from __future__ import annotations

import ctypes
import io
import threading
from contextlib import suppress

from edgekv.documents.plain import DOCUMENT_MAX, too_long
from edgekv.documents.watch import Watch
from edgekv.errors import BadInput

PAGES_MAX = 10_000
"""The longest contexts hold less."""
LOOK_S = 0.05
"""Seconds between two looks at the clock."""
TRIES = 20
"""To end a thread: Python ignores what is raised in a destructor or a weak reference's callback."""


def text_of(data: bytes, what: str) -> str:
    """The text of a PDF's pages, a blank line between two. what: the document, for messages.

    Raises BadInput without pypdf, and for what is no PDF, has no text or too much, or takes too
    long.
    """
    try:
        import pypdf  # noqa: F401
    except ImportError:
        raise BadInput(
            f"reading {what} needs pypdf: pip install 'edgekv[pdf]', or give its text"
        ) from None
    reading = _Reading(data, what)
    with Watch(what) as watch:
        try:
            reading.start()
            while not reading.ended.wait(LOOK_S):
                watch(reading.n_read, reading.n_pages)
        finally:
            reading.give_up()
    if reading.error:
        raise reading.error
    text = "\n\n".join(filter(None, reading.pages))
    if not text:
        raise BadInput(f"{what} has no text in it, perhaps scanned pages; read it with OCR first")
    return text


class _Reading(threading.Thread):
    """Reads a PDF. A page can take for ever, so another thread waits, and may give up."""

    def __init__(self, data: bytes, what: str) -> None:
        super().__init__(name="pdf", daemon=True)
        self._data, self._what = data, what
        self.n_pages = 1
        """As far as is known."""
        self.pages: list[str] = []
        self.error: BadInput | None = None
        self.ended = threading.Event()
        """`is_alive` is wrong after a Ctrl-C in `join`."""

    @property
    def n_read(self) -> int:
        return len(self.pages)

    def give_up(self) -> None:
        """End the thread if it is still there."""
        error = ctypes.py_object(SystemExit)  # pypdf catches no more than Exception
        for _ in range(TRIES):
            if self.ended.is_set():
                return
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), error)
            self.ended.wait(LOOK_S)

    def run(self) -> None:
        with suppress(SystemExit):
            try:
                self._read()
            except BadInput as error:
                self.error = error
            except Exception as error:  # of a damaged or encrypted file, of any kind
                why = " ".join(str(error).split()) or type(error).__name__
                self.error = BadInput(f"{self._what} is no PDF that can be read ({why})")
            finally:
                self.ended.set()

    def _read(self) -> None:
        from pypdf import PdfReader

        pages, n_bytes = PdfReader(io.BytesIO(self._data)).pages, 0
        self.n_pages = len(pages)
        if self.n_pages > PAGES_MAX:
            raise BadInput(
                f"{self._what} has {self.n_pages:,} pages, and {PAGES_MAX:,} are the most; give a"
                " part of it"
            )
        for i in range(self.n_pages):
            text = pages[i].extract_text().strip()
            self.pages.append(text.encode("utf-8", "replace").decode("utf-8"))
            n_bytes += len(self.pages[-1].encode())
            if n_bytes > DOCUMENT_MAX:
                raise too_long(self._what)
