"""POST /extract: the text in a file, which is read as `edgekv pack` reads it."""

from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import Future
from io import BytesIO
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest

from edgekv.base.text import printable
from edgekv.documents.extract import text_of
from edgekv.documents.plain import read_bounded
from edgekv.errors import BadInput
from edgekv.serve.errors import too_long
from edgekv.serve.service import service_of

router = APIRouter()

PATIENCE_S = 60.0
"""Seconds that a file may take, those in which others are read included."""
_turn = threading.Lock()


@router.post("/extract")
async def extract(name: str, http: HttpRequest) -> dict[str, Any]:
    """Text and number of tokens of the file in the body. name: its end says what it is."""
    service = service_of(http)
    reading = _started(name, await http.body())
    try:
        text = await asyncio.wait_for(asyncio.wrap_future(reading), PATIENCE_S)
    except asyncio.TimeoutError:
        raise BadInput(
            f"'{name}' is not read after {PATIENCE_S:g} seconds; give a part of it, or its text"
        ) from None
    data = text.encode("utf-8", "replace")
    tokens = await asyncio.to_thread(service.llm.tokenize, data, False, False)
    n, n_ctx = len(tokens), service.n_ctx
    if n >= n_ctx:
        said = f"'{name}' has {n:,} tokens, but the context is {n_ctx:,}: give a part of it"
        raise too_long(said, n, n_ctx)
    return {"name": name, "content": text, "n_tokens": n}


def _started(name: str, data: bytes) -> Future[str]:
    """One file is read at a time, in a thread that the server's end does not wait for."""
    found: Future[str] = Future()

    def read() -> None:
        if not _turn.acquire(timeout=PATIENCE_S):
            return
        try:
            if found.set_running_or_notify_cancel():
                found.set_result(_text(name, data))
        except BaseException as error:
            found.set_exception(error)
        finally:
            _turn.release()

    threading.Thread(target=read, name="extract", daemon=True).start()
    return found


def _text(name: str, data: bytes) -> str:
    """Raises BadInput."""
    what, kind = f"'{printable(name)}'", re.search(r"\.\w{1,10}$", name, re.ASCII)
    return text_of(read_bounded(BytesIO(data), what), what, kind[0].lower() if kind else "")
