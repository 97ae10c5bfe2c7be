"""A server of a tiny model in a thread of the tests' process, on a free port."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from edgekv import Llama
from edgekv.serve.listening import listen
from edgekv.serve.options import ServeOptions
from edgekv.serve.run import Server
from tests.lib import ROOT

BROWSER = {"Accept": "text/html,*/*"}
"""Headers of a browser that opens a page."""
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


def started(
    tiny: Any, tmp_path: Path, *words: str, before: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """The command, which listens by now; its address is the attribute `url`, what it said before
    the attribute `said`. before: words of a command that runs it.
    """
    command = [*before, sys.executable, "-m", "edgekv", "serve", "-m", str(tiny("llama-gqa"))]
    command += ["--port", "0", "-c", "512", "-t", "1", *words]
    places = {"XDG_CACHE_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    child = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **places}, stderr=subprocess.PIPE, text=True
    )
    child.said = ""
    while " at " not in (line := child.stderr.readline()):
        assert line, child.said
        child.said += line
    child.url = line.split(" at ")[1].strip()
    return child
