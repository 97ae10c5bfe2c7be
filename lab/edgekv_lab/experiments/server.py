"""A process of `edgekv serve`, for the experiments that ask one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

import edgekv
from edgekv.commands.declare import option
from edgekv.errors import EdgeKVError
from edgekv_lab.experiments.experiment import MODEL, THREADS, Options
from edgekv_lab.process import edgekv_line

MIB = 2**20
PATIENCE = 600
"""Seconds after which something does not happen any more."""


class Server:
    """It answers once this is made. words: its command line, but for the address; more: of
    `subprocess.Popen`. What it logs goes to a file.
    """

    health = "/health"

    def __init__(self, words: Sequence[str], **more: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()
        begin = time.monotonic()
        logged = {"stdout": self._log, "stderr": self._log}
        self.process = self.start([*words, "--port", str(port)], **logged, **more)
        while not self.is_up():
            if self.process.poll() is not None:
                raise EdgeKVError(f"the server does not start; it said:\n{self.log()}")
            time.sleep(0.1)
        self.start_s, self.start_cpu_s = time.monotonic() - begin, self._cpu_s()

    def start(self, words: list[str], **more: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(edgekv_line("serve", *words), **more)

    def is_up(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(self.url + self.health, timeout=PATIENCE).status_code == 200
        return False

    def end(self, how: signal.Signals = signal.SIGTERM) -> float:
        """Returns the seconds that it took."""
        begin = time.monotonic()
        self.process.send_signal(how)
        self.process.wait(PATIENCE)
        return time.monotonic() - begin

    def log(self) -> str:
        """All that it logged. Its own place in the file stays at the end."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def rss(self) -> int:
        """Bytes."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        return 0

    def _cpu_s(self) -> float:
        """Seconds of processor that it took."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def conversations(self) -> list[dict[str, Any]]:
        """As it lists them. Raises HTTPError."""
        listed = httpx.get(f"{self.url}/conversations", timeout=PATIENCE)
        found: list[dict[str, Any]] = listed.raise_for_status().json()["data"]
        return found


@contextmanager
def serving(words: Sequence[str], kind: type[Server] = Server, **more: Any) -> Iterator[Server]:
    """The server ends with the block."""
    server = kind(words, **more)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end()


SERVED = (
    MODEL,
    option("--kv-ratio", default="0.2", metavar="R", help="Of the server."),
    THREADS,
)
"""The options that `words_of` takes."""


def prepare(model: str) -> None:
    """A later start goes by what the one-time preparation has found, and answers otherwise."""
    if not edgekv.has_profile(model):
        edgekv.make_profile(model)


def words_of(o: Options, *more: str) -> list[str]:
    """Of a server that answers greedily where a request says nothing."""
    words = ["-m", o.model, "--kv-ratio", o.kv_ratio, "-t", str(o.threads)]
    return [*words, "--temp", "0", "--metrics", *more]


def tokens_of(server: Server, text: str) -> list[int]:
    body = {"content": text}
    found = httpx.post(f"{server.url}/tokenize", json=body, timeout=PATIENCE).json()
    tokens: list[int] = found["tokens"]
    return tokens
