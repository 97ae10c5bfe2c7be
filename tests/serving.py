"""A server of a tiny model in a thread of the tests' process, on a free port."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from edgekv import Llama
from edgekv.serve.options import ServeOptions
from edgekv.serve.run import Server, listen

PATIENCE = 60
"""Seconds after which something does not happen any more; other processes may have the cores."""
get, post, delete = (partial(f, timeout=PATIENCE) for f in (httpx.get, httpx.post, httpx.delete))
stream = partial(httpx.stream, "POST", timeout=PATIENCE)


@contextmanager
def serving(
    model: Path, options: ServeOptions | None = None, **arguments: Any
) -> Iterator[tuple[str, Server]]:
    """Yields (address without a path, server). arguments: of `Llama`."""
    usual = {"n_ctx": 2048, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    llm = Llama(str(model), **{**usual, **arguments})
    server = Server(llm, options or ServeOptions())
    listening = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", server
    finally:
        server.handle_exit(2, None)
        thread.join(PATIENCE)
        assert not thread.is_alive()
        llm.close()


def until(condition: Any, seconds: float = PATIENCE) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)
