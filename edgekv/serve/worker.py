"""The one thread that uses the model. It answers some requests in turns, the others wait.

Turns go to the clients in turn, whatever each of them asks for.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn

from edgekv.errors import Cancelled, EdgeKVError
from edgekv.llama.llama import Llama
from edgekv.serve.conversations import ServerConversations
from edgekv.serve.errors import ApiError
from edgekv.serve.events import Done, Event
from edgekv.serve.job import Job, State
from edgekv.serve.queue import FairQueue, many_wait
from edgekv.serve.share import WORTH, Share
from edgekv.serve.totals import Totals

TURN = 8
"""Tokens that an answer writes at least before another one's turn comes. A turn also lasts at least
WORTH times as long as it takes to change conversations.
"""

BEAT_S = 1.0
"""Seconds between two signs of life of a worker that has nothing to do."""

log = logging.getLogger("edgekv.serve")

Call = tuple[Callable[[], Any], Future[Any]]


class Worker:
    """The one thread that uses the model: reads prompts and writes answers, in turns.

    n_parallel: answers under way at once; one more is of a client that has none, while fewer than
    n_parallel clients have any. n_queue: requests that may wait besides.
    """

    def __init__(
        self, llm: Llama, conversations: ServerConversations, n_parallel: int = 1, n_queue: int = 64
    ) -> None:
        self._llm, self.conversations = llm, conversations
        self._n_parallel = n_parallel
        self._queue: FairQueue[Job] = FairQueue(n_queue)
        self._active = list[Job]()
        self._calls: deque[Call] = deque()
        self._idle_calls: deque[Call] = deque()
        self._beat = time.monotonic()
        self._next_call = 0.0
        """The clock's time from which another call may run while answers are written."""
        self._wake = threading.Condition()
        self._using: Job | None = None
        """The job whose step is in the model at this moment."""
        self._reader: Job | None = None
        """The job whose prompt is being read; short ones are answered meanwhile."""
        self._share, self._is_short = Share(), dict[Job, bool]()
        self._last: Job | None = None
        self._is_stopping = False
        self.totals = Totals()
        self._thread = threading.Thread(target=self._run, name="edgekv-worker")

    # ---- from any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End all answers. Returns at once; `join` waits. May be called from a signal handler."""
        self._is_stopping = True
        self._llm.kv_cancel()
        threading.Thread(target=self._notify).start()  # a handler must not wait for the lock

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def join(self) -> None:
        self._thread.join()

    def submit(self, job: Job) -> None:
        """Raises ApiError 503 if too many wait, or if the server stops. The last one of a client
        that has many may have to leave instead.
        """
        with self._wake:
            if self._is_stopping:
                _refuse()
            self._admit()
            clients = self._clients()
            is_first = job.client not in clients and len(clients) < self._n_parallel
            if is_first or len(self._active) < self._n_parallel:
                self._active.append(job)  # it is taken at once, and needs no place to wait
            elif left := self._queue.put(job.client, job):
                self._deliver(left, many_wait(len(self._queue)))
            self._wake.notify_all()

    def cancel(self, job: Job) -> None:
        """Stop a job within a chunk of its prompt, or a token. It gets no more events."""
        with self._wake:
            job.is_cancelled = True
            if not self._queue.remove(job) and self._using is job:
                self._llm.kv_cancel()
            self._wake.notify_all()

    def call(self, function: Callable[[], Any], when_idle: bool = False) -> Future[Any]:
        """Run a function that uses the model, between two steps; when_idle: without answers."""
        done: Future[Any] = Future()
        with self._wake:
            if self._is_stopping:
                _run_call(_refuse, done)
            else:
                (self._idle_calls if when_idle else self._calls).append((function, done))
                self._wake.notify_all()
        return done

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for an answer."""
        return not self._active and not len(self._queue)

    @property
    def silent_s(self) -> float:
        """Seconds since the worker's last sign of life; infinite once it has ended."""
        return time.monotonic() - self._beat if self._thread.is_alive() else math.inf

    @property
    def is_reading(self) -> bool:
        """Whether a prompt is being read."""
        return self._reader is not None

    @property
    def n_waiting(self) -> int:
        return len(self._queue)

    def active(self) -> list[Job]:
        """The jobs that are answered."""
        with self._wake:
            return list(self._active)

    # ---- the worker's thread

    def _run(self) -> None:
        while (work := self._schedule()) is not None:
            work()
        self._end_all()

    def _schedule(self) -> Callable[[], None] | None:
        """What comes next, a call or an answer's turn; it waits for it. None: the server stops."""
        with self._wake:
            while self.is_idle and not (self._is_stopping or self._calls or self._idle_calls):
                self._beat = time.monotonic()
                self._wake.wait(BEAT_S)
            if self._is_stopping:
                return None
            self._admit()
            call = self._due()
            return partial(self._call, *call) if call else partial(self._take_turn, self._active[0])

    def _due(self) -> Call | None:
        """The call whose turn it is. The lock is held."""
        if self._may_call():
            return self._calls.popleft()
        return self._idle_calls.popleft() if self._idle_calls and not self._active else None

    def _may_call(self) -> bool:
        """Whether a call waits whose turn it is: answers have most of the time."""
        is_due = not self._active or time.perf_counter() >= self._next_call
        return bool(self._calls) and is_due

    def _call(self, function: Callable[[], Any], done: Future[Any]) -> None:
        begin, current = time.perf_counter(), self.conversations.current_id
        _run_call(function, done)
        if self.conversations.current_id != current:
            self._last = None
        now = time.perf_counter()
        self._next_call = now + WORTH * (now - begin)

    def _admit(self) -> None:
        """Who waits takes the places there are. The lock is held."""
        while (job := self._next()) is not None:
            self._active.append(job)

    def _next(self) -> Job | None:
        """Who is answered now, too: first clients of which nothing is."""
        clients, job = self._clients(), None
        if len(clients) < self._n_parallel:
            job = self._queue.get(but=clients)
        if job is None and len(self._active) < self._n_parallel:
            job = self._queue.get()
        return job

    def _clients(self) -> set[Hashable]:
        return {job.client for job in self._active}

    def _take_turn(self, job: Job) -> None:
        """Some steps of a job, with others that are written; then it comes last, or leaves."""
        is_guest = self._reader is not None  # calls wait until the prompt is read
        begin, n, turn = time.perf_counter(), 0, [job]
        while not self._is_stopping and (is_guest or not self._may_call()):
            beside = self._beside(job)
            if beside:
                turn = beside
                self._step_together(beside)
            else:
                self._guarded(job, lambda: self._step(job))
            least, n = WORTH * job.switch_s * (not beside), n + 1
            is_long = n >= TURN and time.perf_counter() - begin >= least
            if job.state is State.DONE or is_long or (not is_guest and self._is_awaited(job)):
                break
        clients = {one.client for one in turn}
        with self._wake:  # all answers of a client come behind those of others
            self._active.sort(key=lambda one: (one.client in clients, one in turn))

    def _is_awaited(self, job: Job) -> bool:
        """Whether an answer has not begun that can then be written in the same steps as this one:
        the sooner it begins, the more of them have a token of both.
        """
        if job.unread is None or self._llm.context_params.n_seq_max < 2:
            return False
        with self._wake:
            return any(x.state is State.WAITING for x in self._active)

    def _guarded(self, job: Job, step: Callable[[], bool]) -> None:
        """A step of a job, which leaves if that says so by False, or fails."""
        goes_on = False
        try:
            goes_on = not job.is_cancelled and step()
        except Cancelled:
            if self._is_stopping and not job.is_cancelled:
                self._deliver(job, ApiError(503, "the server is stopping"))
        except EdgeKVError as error:
            self._deliver(job, ApiError(400, str(error)))
        except Exception:
            log.exception("an answer failed")
            self._deliver(job, ApiError(500, "the server has a fault: see its log"))
        if not goes_on or job.is_cancelled:
            with self._wake:
                self._leave(job)

    def _beside(self, job: Job) -> list[Job]:
        """The answers that get a token in one pass now, with this one; none if that is alone."""
        if job.unread is None:
            return []
        with self._wake:
            writing = {x.unread[0]: x for x in self._active if x.unread and not x.is_cancelled}
        if len(writing) < 2:
            return []
        found = [writing[id] for id in self.conversations.together(list(writing))]
        return found if job in found else []

    def _step_together(self, jobs: list[Job]) -> None:
        """A token of each of these answers."""
        self._beat = time.monotonic()
        with self._wake:
            if self._is_stopping:
                return
            self._llm.kv_cancel(False)
        for job in jobs:
            job.wait()
        self._last = None  # the next step of one alone begins with its conversation
        try:
            self.conversations.step(dict(filter(None, (job.unread for job in jobs))))
        except EdgeKVError as error:
            if not self._is_stopping:
                log.warning("answers are written one by one: %s", error)
                for job in jobs:
                    self._guarded(job, partial(self._step, job))
            return
        ended: list[tuple[Job, str]] = []

        def write(job: Job, index: int) -> bool:
            finish = job.write(index)
            if finish:
                ended.append((job, finish))
            return True

        for i, job in enumerate(jobs):
            self._guarded(job, partial(write, job, i))
        for job, finish in ended:  # other logits are gone once a conversation is current
            self._guarded(job, partial(_finish, job, finish))

    def _step(self, job: Job) -> bool:
        self._beat = time.monotonic()
        with self._wake:
            if job.is_cancelled:
                return False
            self._llm.kv_cancel(False)  # a wish that came too late for another step
            if self._is_stopping:
                raise Cancelled("stopping")
            self._using = job
        try:
            if job.state is State.WAITING:
                job.begin(
                    self._llm,
                    self.conversations,
                    lambda event: self._deliver(job, event),
                    self._let_others,
                )
            is_current, self._last = self._last is job, job
            if job.has_read or self._reader is not None:
                return job.step(is_current)
            self._reader, self._share, self._is_short = job, Share(), {}
            try:
                return job.step(is_current)
            finally:
                self._reader = None
        finally:
            with self._wake:
                self._using = None

    # ---- while a prompt is read

    def _let_others(self) -> None:
        """Between two chunks of a prompt: others go on for a while, if they have not had half of
        the time. Raises Cancelled if the reader is to stop.
        """
        self._beat = time.monotonic()
        reader = self._reader
        if reader is None or self._using is not reader or not self.conversations.can_wait():
            return
        until = self._share.until()
        if until is None or not any(map(self._may_be_guest, self._others())):
            return
        begin, used_s = time.perf_counter(), 0.0
        try:
            with self.conversations.meanwhile():
                used_s = self._serve_guests(reader, until)
        finally:
            self._share.lent(begin, used_s)
            self._last = reader
        with self._wake:
            self._using = reader
            self._llm.kv_cancel(False)  # a wish to stop another one that came too late
            if reader.is_cancelled or self._is_stopping:
                raise Cancelled("stopping")

    def _serve_guests(self, reader: Job, until: float) -> float:
        """Turns of others until a time of the clock, at least one. Returns their seconds."""
        begin = now = time.perf_counter()
        while (job := self._next_guest()) and not (reader.is_cancelled or self._is_stopping):
            self._take_turn(job)
            now = time.perf_counter()
            if now >= until:
                break
        return now - begin

    def _next_guest(self) -> Job | None:
        """Whose turn it is while a prompt waits half read: one that is written, or is short."""
        return next((job for job in self._others() if self._is_guest(job)), None)

    def _others(self) -> list[Job]:
        with self._wake:
            self._admit()
            return [job for job in self._active if job is not self._reader]

    def _may_be_guest(self, job: Job) -> bool:
        """Whether it is not known to be a long prompt."""
        return job.is_cancelled or job.has_read or self._is_short.get(job, True)

    def _is_guest(self, job: Job) -> bool:
        if not job.has_read and not job.is_cancelled and job not in self._is_short:
            try:
                self._is_short[job] = self.conversations.is_short(
                    job.request.prompt, job.request.is_fresh
                )
            except Exception:  # the error is that job's own: its turn says what it is
                self._is_short[job] = True
        return self._may_be_guest(job)

    def _leave(self, job: Job) -> None:
        self._active.remove(job)
        job.close()

    def _deliver(self, job: Job, event: Event) -> None:
        if isinstance(event, Done):
            self.totals.add(event)
        if not job.is_cancelled:
            job.emit(event)

    def _end_all(self) -> None:
        stopping = ApiError(503, "the server is stopping")
        with self._wake:
            while (waiting := self._queue.get()) is not None:
                self._active.append(waiting)
            for job in list(self._active):
                self._leave(job)
                self._deliver(job, stopping)
            for calls in (self._calls, self._idle_calls):
                for _, done in calls:
                    _run_call(_refuse, done)
                calls.clear()
        self._llm.kv_cancel(False)


def _refuse() -> NoReturn:
    raise ApiError(503, "the server is stopping")


def _finish(job: Job, finish: str) -> bool:
    job.finish(finish)
    return False


def _run_call(function: Callable[[], Any], done: Future[Any]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(function())
    except BaseException as error:
        done.set_exception(error)
