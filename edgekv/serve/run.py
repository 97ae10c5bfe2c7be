"""The server as a process: it listens, serves, and ends in order."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from edgekv.errors import BadInput
from edgekv.serve.app import create_app
from edgekv.serve.connections import limited, most_connections
from edgekv.serve.conversations import Turns
from edgekv.serve.options import ServeOptions
from edgekv.serve.service import Service
from edgekv.serve.worker import Worker

if TYPE_CHECKING:
    from edgekv import Llama

N_UNACCEPTED = 2048
"""Connections that the system holds until they are accepted."""
GRACE_S = 5
"""Seconds that connections have to end after Ctrl-C."""


class Server(uvicorn.Server):
    """Serves one model. `run` returns when it has been told to stop."""

    def __init__(
        self,
        llm: Llama,
        options: ServeOptions,
        verbose: bool = False,
        when_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises BadInput for what cannot be used."""
        self._when_ready = when_ready
        self._conversations = Turns(
            llm, options.cache_ram, options.cache_disk, options.cache_disk_size
        )
        self._conversations.open_packs(options.packs)
        self.worker = Worker(llm, self._conversations, options.parallel, options.max_queue)
        self.service = Service(llm, self.worker, options)
        n_most = most_connections()
        super().__init__(
            uvicorn.Config(
                create_app(self.service),
                http=limited(n_most),
                backlog=max(n_most // 4, 1),  # so many are accepted at once
                lifespan="off",
                ws="none",
                log_level="info" if verbose else "warning",
                access_log=verbose,
                server_header=False,
                timeout_graceful_shutdown=GRACE_S,
            )
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        with _logged():
            self._run(sockets)

    def _run(self, sockets: list[socket.socket] | None) -> None:
        self.worker.start()
        try:
            super().run(sockets)
        finally:
            self.worker.stop()
            self.worker.join()
            self._conversations.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(N_UNACCEPTED)
        self._when_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ctrl-C: answers end, so that connections can."""
        self.worker.stop()
        super().handle_exit(sig, frame)


@contextmanager
def _logged() -> Iterator[None]:
    """A `with` block in which what happens to conversations is said, one line each."""
    log, handler = logging.getLogger("edgekv"), logging.StreamHandler()
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def listen(host: str, port: int) -> socket.socket:
    """A socket of an address; clients are refused until the server has started.

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
