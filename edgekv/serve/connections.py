"""How many connections there may be: fewer than the process may have files open."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    Protocol: Any = asyncio.Protocol
else:
    Protocol = AutoHTTPProtocol

USUAL_MOST, LEAST = 4096, 4
N_OTHER_FILES = 16
"""Files that the process may still want to open."""
IDLE_S = 30.0
"""Seconds that a connection may take to begin a request."""


def most_connections() -> int:
    """Half of the files that may still be opened: the system hands over more at once."""
    if resource is None:
        return USUAL_MOST
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return USUAL_MOST
    n_free = limit - _n_open(limit) - N_OTHER_FILES
    return min(max(n_free // 2, LEAST), USUAL_MOST)


def _n_open(limit: int) -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return limit // 4


def limited(n_most: int) -> type[asyncio.Protocol]:
    """The class of connections, n_most at most: one that is idle makes room for a new one."""

    class Limited(Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > n_most:
                _idle(self).transport.abort()
            self.loop.call_later(IDLE_S, self._end_unless_used)

        def _end_unless_used(self) -> None:
            if self.cycle is None:
                self.transport.abort()

    return Limited


def _idle(new: Any) -> Any:
    """A connection without a request, or the new one."""
    for one in new.connections:
        is_idle = one.cycle is None or one.cycle.response_complete
        if one is not new and is_idle and not one.transport.is_closing():
            return one
    return new
