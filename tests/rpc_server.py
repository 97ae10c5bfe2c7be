"""`python -m tests.rpc_server HOST:PORT`: llama.cpp's RPC server with the CPU, from edgekv's own
library. It serves until it is killed.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from edgekv.library import library_path, open_llama
from tests.lib import ROOT

CPU = 0
"""ggml's GGML_BACKEND_DEVICE_TYPE_CPU."""


@contextmanager
def serving() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A `with` block beside a server in a process of its own. Yields its endpoint and process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.rpc_server", endpoint],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        text=True,
    )
    try:
        wait_for(endpoint, server)
        yield endpoint, server
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()


def wait_for(endpoint: str, server: subprocess.Popen[str], seconds: float = 60) -> None:
    host, port = endpoint.split(":")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert server.poll() is None, "the server has ended"
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the server does not listen")


def serve(endpoint: str) -> None:
    open_llama()  # and the backends with it
    rpc, ggml = (ctypes.CDLL(str(library_path(name))) for name in ("ggml-rpc", "ggml"))
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    devices = (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_by_type(CPU))
    start = rpc.ggml_backend_rpc_start_server
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, *[ctypes.c_size_t] * 2, ctypes.c_void_p]
    start(endpoint.encode(), None, 1, 1, devices)


if __name__ == "__main__":
    serve(sys.argv[1])
