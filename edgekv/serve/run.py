"""The server as a process: it listens, serves, and ends in order."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType

from fastapi import FastAPI

from edgekv.llama.llama import Llama
from edgekv.serve.app import create_app
from edgekv.serve.conversations import ServerConversations
from edgekv.serve.door import Door
from edgekv.serve.listening import ListeningServer
from edgekv.serve.options import ServeOptions
from edgekv.serve.service import Service
from edgekv.serve.worker import Worker

TEXTS_S = 0.5
"""Seconds that texts have which are cut into tokens then: nothing of them is kept."""
TICK_S = 0.5


class Server(ListeningServer):
    """Serves one model. `run` returns when it has been told to stop."""

    worker: Worker
    service: Service

    def __init__(self, llm: Llama | None, options: ServeOptions, verbose: bool = False) -> None:
        """llm: None until `open`. Raises BadInput for what cannot be used."""
        self._options, self._door = options, Door(options)
        self._app: FastAPI | None = None
        self._is_running = False
        self._over = threading.Event()  # waiting for a thread is undone by a signal's exception
        self._is_stuck = False
        self._level = logging.DEBUG if verbose else logging.INFO
        super().__init__(self._door, verbose)
        if llm is not None:
            self.open(llm)

    def open(self, llm: Llama, options: ServeOptions | None = None) -> None:
        """Requests are answered by this model from now on. options: in the place of those from the
        beginning, but for address and keys. Raises BadInput.
        """
        options = options or self._options
        llm.write_together(options.parallel, options.cont_batching)
        conversations = ServerConversations(
            llm, options.cache_ram, options.cache_disk, options.cache_disk_size
        )
        conversations.open_packs(options.packs)
        self.worker = Worker(llm, conversations, options.parallel, options.max_queue)
        self.service = Service(llm, self.worker, options)
        self._app = create_app(self.service)
        if self._is_running:
            self._begin()

    def _begin(self) -> None:
        assert self._app is not None
        self.worker.start()
        self._door.app = self._app

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        self._is_running = True
        if self._app is not None:
            self._begin()
        with _logged(self._level):
            try:
                super().run(sockets)
            finally:
                self._finish()

    def _finish(self) -> None:
        """The worker ends, and conversations are written down."""
        if self._app is not None:
            self.worker.stop()
            self.worker.join()
            self.worker.conversations.close()
            self._app.state.preparing.stop()
            self._is_stuck = not self._app.state.preparing.join(TEXTS_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ctrl-C: answers end, so that connections can."""
        if self._app is not None:
            self.worker.stop()
            self._app.state.preparing.stop()
        super().handle_exit(sig, frame)

    # ---- in a thread of its own, while another one loads the model

    @contextmanager
    def running(self, sockets: list[socket.socket]) -> Iterator[None]:
        """A `with` block in which the server listens."""

        def run() -> None:
            try:
                self.run(sockets)
            finally:
                self._over.set()

        threading.Thread(target=run, name="edgekv-server").start()
        try:
            yield
        finally:
            self._end()

    def answer_with(
        self, llm: Llama, options: ServeOptions, ready: Callable[[], None], tick: Callable[[], None]
    ) -> None:
        """Requests are answered by this model, until a signal's exception. The model may be closed
        afterwards. tick: called now and then. Raises BadInput.
        """
        try:
            self.open(llm, options)
            ready()
            while not self._over.wait(TICK_S):
                tick()
        finally:
            self._end()

    def renew(self) -> Future[None]:
        """`ServerConversations.renew_profile`, as soon as no answer is written."""
        return self.worker.call(self.worker.conversations.renew_profile, when_idle=True)

    def _end(self) -> None:
        """The server ends; a second signal makes it hurry."""
        if not self._over.is_set():
            self.handle_exit(signal.SIGTERM, None)
        while not self._over.is_set():
            try:
                self._over.wait(TICK_S)
            except (KeyboardInterrupt, SystemExit):
                self.force_exit = True
        if self._is_stuck:  # llama.cpp still cuts a text up, and would miss its model
            sys.stderr.flush()
            os._exit(128 + signal.SIGTERM)


@contextmanager
def _logged(level: int) -> Iterator[None]:
    """A `with` block in which what happens to conversations is a line each, from a level on."""
    log, handler = logging.getLogger("edgekv"), logging.StreamHandler()
    before = log.level
    log.setLevel(level)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
