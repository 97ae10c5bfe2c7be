"""A server of one model in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path

import psutil

import edgekv

HOST = "127.0.0.1"
PATIENCE_S = 60.0
"""Seconds that a child has to write its conversations down."""
_READY = re.compile(rf" at http://{re.escape(HOST)}:(\d+)$")


class Child:
    """One model's server, a process of its own.

    name: of its model, as its lines in the log are called; words: of the command line, without
    address and model; key: that it asks for.

    ready: its port, or EdgeKVError's words as an exception, once it answers or has ended.
    """

    def __init__(self, name: str, path: str, words: Sequence[str], key: str) -> None:
        self.name = name
        self.ready: Future[int] = Future()
        own = ["-m", path, "--host", HOST, "--port", "0", "--alias", name.replace(",", " ")]
        # the same package, whatever lies in the current folder
        root = str(Path(edgekv.__file__).parent.parent)
        code = f"import sys; sys.path[0] = {root!r}; from edgekv.__main__ import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", *words, *own, "--no-ui", "--behind-router"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "LLAMA_API_KEY": key},
            start_new_session=True,  # Ctrl-C is the router's
        )
        self._thread = threading.Thread(target=self._read, name="edgekv-child", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        """Its log becomes the router's."""
        assert self._process.stderr
        last = ""
        for data in self._process.stderr:
            line = data.decode(errors="replace").rstrip()
            last = line or last
            found = _READY.search(line)
            if found and not self.ready.done():
                self.ready.set_result(int(found[1]))
            print(f"{self.name}: {line}", file=sys.stderr, flush=True)
        self._process.stderr.close()
        code = self._process.wait()
        why = last.removeprefix("edgekv: ") if code > 0 and last else f"its process ended ({code})"
        with suppress(InvalidStateError):
            self.ready.set_exception(RuntimeError(why))

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def ends_within(self, seconds: float) -> bool:
        """Whether the process has ended, or does so in this time: a process that was killed has
        closed its sockets before it is gone.
        """
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def n_bytes(self) -> int:
        """What the process takes in main memory now."""
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def stop(self) -> None:
        """It ends, as after SIGTERM: its input is over."""
        if self._process.stdin and not self._process.stdin.closed:
            with suppress(OSError):
                self._process.stdin.close()

    def end(self) -> None:
        """Stop it and wait, without patience in the end."""
        self.stop()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()
