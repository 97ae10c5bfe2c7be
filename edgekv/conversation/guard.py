"""Who may use a model: one thread at a time, no callback, nobody once it is closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from edgekv.errors import BadInput, EdgeKVError

CLOSED = "this model is closed: load it again"


class Guard:
    """Guards one model. llama.cpp ends the process where two threads use a context at once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_calling_back = False
        self.is_closed = False
        self.why_not = ""
        """Why nothing can be computed with the model; empty if it can."""
        self._writer = 0  # thread that writes the answer under way, 0: there is none

    @contextmanager
    def use(self) -> Iterator[None]:
        """A `with` block that uses the model.

        Raises EdgeKVError if it is closed or cannot compute, if another thread uses it at this
        moment, or if a callback of this thread's own call is running.
        """
        if not self._lock.acquire(blocking=False):
            raise EdgeKVError("another thread is using this model: wait until it has finished")
        try:
            if self.is_closed:
                raise EdgeKVError(CLOSED)
            if self.why_not:
                raise BadInput(self.why_not)
            if self._is_calling_back:
                raise EdgeKVError(
                    "kv_progress cannot use the model, which is reading: do it when the call has"
                    " returned"
                )
            yield
        finally:
            self._lock.release()

    @contextmanager
    def calling_back(self, may_use: bool = False) -> Iterator[None]:
        """A `with` block that runs the user's code in the middle of a native call. may_use: one
        inside of such code in which this thread may use the model after all.
        """
        self._is_calling_back = not may_use
        try:
            yield
        finally:
            self._is_calling_back = may_use

    def begin_answer(self) -> None:
        """This thread starts to write an answer.

        Raises EdgeKVError if an answer of another thread is under way: its next token would be
        another conversation's. An answer of the same thread that was not read to its end is over.
        """
        if self._writer not in (0, threading.get_ident()):
            raise EdgeKVError(
                "another thread's answer is being written: read it to its end or close it first"
            )
        self._writer = threading.get_ident()

    def step(self) -> None:
        """The answer under way goes on, in this thread from now on."""
        self._writer = threading.get_ident()

    def end_answer(self) -> None:
        self._writer = 0


class Closed:
    """Stands where a closed model's parts were."""

    def __getattr__(self, name: str) -> NoReturn:
        raise EdgeKVError(CLOSED)
