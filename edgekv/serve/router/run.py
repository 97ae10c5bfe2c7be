"""The router as a process: it listens, and ends with its children."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from edgekv.base.machine import rss_now
from edgekv.models.found.found import Found
from edgekv.serve.listening import ListeningServer
from edgekv.serve.options import ServeOptions
from edgekv.serve.router.app import create_router, new_state
from edgekv.serve.router.child import Child
from edgekv.serve.router.loaded import Models
from edgekv.serve.router.options import RouterOptions


class RouterServer(ListeningServer):
    """The server that hands requests on to the models' own servers.

    words: of the command line, for the models' own servers. `run` returns when it has been told
    to stop, and all models have ended.
    """

    def __init__(
        self, options: ServeOptions, router: RouterOptions, words: Sequence[str], verbose: bool
    ) -> None:
        key = options.api_keys[0] if options.api_keys else secrets.token_urlsafe(32)

        def start(model: Found) -> Child:
            return Child(model.name, model.path, [*words, *_disk(options, model)], key)

        self.models = Models(router, start, rss_now())  # a child begins as this process did
        app = create_router(options, new_state(router, self.models, key))
        super().__init__(app, verbose)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tending = asyncio.ensure_future(self.models.tend())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._tending.cancel()
        ending = asyncio.ensure_future(self.models.end())  # their answers end, and connections can
        await super().shutdown(sockets)
        await ending


def _disk(options: ServeOptions, model: Found) -> list[str]:
    """Each model's conversations lie in a folder of their own."""
    if options.cache_disk is None:
        return []
    digest = hashlib.sha256(model.path.encode("utf-8", "replace")).hexdigest()[:16]
    return ["--cache-disk", str(Path(options.cache_disk) / digest)]
