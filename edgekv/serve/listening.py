"""How any of these servers listens."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack

import uvicorn
from starlette.types import ASGIApp

from edgekv.errors import BadInput
from edgekv.serve.connections import limited, most_connections

N_UNACCEPTED = 2048
"""Connections that the system holds until they are accepted."""
GRACE_S = 5
"""Seconds that connections have to end after Ctrl-C."""


class ListeningServer(uvicorn.Server):
    """Serves an application on sockets of `listen`."""

    def __init__(self, app: ASGIApp, verbose: bool = False) -> None:
        n_most = most_connections()
        config = uvicorn.Config(
            app,
            http=limited(n_most),
            backlog=max(n_most // 4, 1),  # so many are accepted at once
            lifespan="off",
            ws="none",
            log_level="info" if verbose else "warning",
            access_log=verbose,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(N_UNACCEPTED)


def listen(host: str, port: int) -> socket.socket:
    """A socket of an address; clients are refused until the server runs.

    port: 0 takes a free one. Raises BadInput.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as unless_done:
            # asyncio sends small pieces at once only where the protocol is named
            listening = unless_done.enter_context(socket.socket(family, kind, protocol))
            if os.name == "posix":  # elsewhere it lets two servers have the same port
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            unless_done.pop_all()
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(
            f"cannot listen on {host}, port {port}: {reason}; give another --host or --port"
        ) from None
    return listening
