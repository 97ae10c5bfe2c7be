"""Whether somebody still waits for an answer, or for what a thread prepares."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from edgekv.serve.errors import ApiError

Answer = TypeVar("Answer")

_here = threading.local()


@contextmanager
def while_wanted(is_gone: Callable[[], bool]) -> Iterator[None]:
    """A `with` block in which `check_wanted` asks this function, in this thread."""
    _here.is_gone = is_gone
    try:
        yield
    finally:
        del _here.is_gone


def check_wanted() -> None:
    """Raises ApiError in a thread that prepares what nobody waits for any more."""
    is_gone = getattr(_here, "is_gone", None)
    if is_gone is not None and is_gone():
        raise ApiError(503, "nobody waits for this any more")


async def unless_gone(http: HttpRequest, answer: Coroutine[Any, Any, Answer]) -> Answer:
    """Await the answer, or stop it where its client goes away.

    Raises ApiError then, which nobody reads.
    """
    working = asyncio.ensure_future(answer)
    watching = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(400, "the client has gone")
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
