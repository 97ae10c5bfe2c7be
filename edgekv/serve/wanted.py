"""Whether somebody still waits for what a thread prepares."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edgekv.serve.errors import ApiError

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
