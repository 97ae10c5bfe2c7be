"""What is done with a request before the model has it: texts, templates, tokens.

It is done in threads of its own, of each client one thing at a time, clients in turns. It ends
where the client goes away.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from edgekv.serve.errors import ApiError
from edgekv.serve.queue import FairQueue, many_wait
from edgekv.serve.service import client_of
from edgekv.serve.wanted import unless_gone, while_wanted

Result = TypeVar("Result")

STOPPING = ApiError(503, "the server is stopping")
N_THREADS = 4
SMALL = 1 << 16
"""Bytes of a request that does not wait behind its client's larger ones."""


@dataclass(eq=False)
class _Task:
    client: Hashable
    work: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)
    is_gone: bool = False


class Preparing:
    """Threads that make prompts of requests before the model has them.

    n_most: requests that may wait, of all clients together.
    """

    def __init__(self, n_most: int) -> None:
        self._queue: FairQueue[_Task] = FairQueue(n_most)
        self._busy: list[_Task] = []
        self._wake = threading.Condition()
        self._is_stopping = False
        self._threads: list[threading.Thread] = []

    async def run(self, client: Hashable, work: Callable[[], Result]) -> Result:
        """What `work` returns. Raises ApiError 503 if too many wait."""
        task = _Task(client, work)
        self._submit(task)
        try:
            result: Result = await asyncio.wrap_future(task.done)
            return result
        finally:
            self._leave(task)

    def stop(self) -> None:
        """Whoever waits is refused, and what is done ends at its next step."""
        with self._wake:
            self._is_stopping = True
            while (task := self._queue.get()) is not None:
                _refuse(task, STOPPING)
            for task in self._busy:
                task.is_gone = True
                _refuse(task, STOPPING)
            self._wake.notify_all()

    def join(self, seconds: float) -> bool:
        """Wait for the threads after `stop`. False if one goes on after that time."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def _submit(self, task: _Task) -> None:
        with self._wake:
            if self._is_stopping:
                raise ApiError(STOPPING.status, STOPPING.message)
            if left := self._queue.put(task.client, task):
                _refuse(left, many_wait(len(self._queue)))
            if len(self._threads) < N_THREADS:
                self._begin()
            self._wake.notify_all()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._work, name="edgekv-preparing", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _leave(self, task: _Task) -> None:
        with self._wake:
            task.is_gone = True
            self._queue.remove(task)

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                with while_wanted(lambda: task.is_gone):
                    settle = _outcome(task)
            finally:
                with self._wake:
                    self._busy.remove(task)
                    self._wake.notify_all()
            with suppress(InvalidStateError):  # it was refused meanwhile
                settle()

    def _next(self) -> _Task | None:
        with self._wake:
            while not self._is_stopping:
                task = self._queue.get(but=[one.client for one in self._busy])
                if task is None:
                    self._wake.wait()
                elif task.done.set_running_or_notify_cancel():
                    self._busy.append(task)
                    return task
        return None


def _outcome(task: _Task) -> Callable[[], None]:
    """Do the work. Returns what tells who waits for it."""
    try:
        return partial(task.done.set_result, task.work())
    except BaseException as error:
        return partial(task.done.set_exception, error)


def _refuse(task: _Task, why: ApiError) -> None:
    with suppress(InvalidStateError):  # it was cancelled meanwhile
        task.done.set_exception(why)


async def prepared(http: HttpRequest, function: Callable[..., Result], *arguments: Any) -> Result:
    """What a function returns that takes a while, and uses no more of the model than its
    vocabulary. It ends where the client goes away.

    Raises ApiError 503 if too many wait, and what the function raises.
    """
    size = http.headers.get("content-length", "")
    is_small = size.isdecimal() and len(size) < 9 and int(size) <= SMALL
    preparing: Preparing = http.app.state.preparing
    working = preparing.run((client_of(http), is_small), partial(function, *arguments))
    return await unless_gone(http, working)
