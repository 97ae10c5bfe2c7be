"""While the server reads a long prompt others are answered; everybody gets what he would alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from edgekv import EdgeKVError
from edgekv.serve import share
from edgekv.serve.conversations import Turns
from edgekv.serve.errors import ApiError
from edgekv.serve.events import Failed, Progress, Written
from edgekv.serve.share import WORTH, Share
from edgekv.serve.worker import Job, Worker
from tests import archs
from tests.engine import load
from tests.serving import until
from tests.test_serve_worker import Log, wish

N_LONG, N_SHORT, N_UBATCH = 900, 50, 96
SLOW_S = 0.02
"""That each part of the long prompt takes at least: a tiny model would have read it in no time."""


class Book(Log):
    """The log of a long prompt's reader. now: called once, when it is half read."""

    def __init__(self, now: Callable[[], object]) -> None:
        super().__init__()
        self.now, self.was_called, self.has_read_at = now, False, 0.0

    def __call__(self, event) -> None:
        super().__call__(event)
        if isinstance(event, Progress) and 0 < event.n_done < event.n_total:
            time.sleep(SLOW_S)
            if not self.was_called:
                self.was_called = True
                self.now()
        if isinstance(event, Progress):
            self.has_read_at = time.perf_counter()


class Note(Log):
    """The log of a short one. now: called when it has written n_before tokens."""

    def __init__(self, n_before: int = -1, now: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.n_before, self.now, self.first_at, self.last_at, self.n = n_before, now, 0.0, 0.0, 0

    def __call__(self, event) -> None:
        super().__call__(event)
        if isinstance(event, Written):
            self.last_at = time.perf_counter()
            self.first_at = self.first_at or self.last_at
            self.n += 1
            if self.n == self.n_before:
                self.now()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return archs.write(tmp_path_factory.mktemp("archs"), "^qwen35$") / "qwen35-dense.gguf"


@pytest.fixture
def working(tiny, hybrid):
    """working(model and cache type, n_parallel, n_queue, **arguments of Llama) -> worker"""
    made = []

    def make(model="llama-gqa f16", n_parallel=4, n_queue=4, **arguments) -> Worker:
        name, kind = model.split()
        path = hybrid if name == "qwen35" else tiny(name)
        usual = dict(n_ctx=2048, n_ubatch=N_UBATCH, n_batch=N_UBATCH, kv_ratio=0.5)
        llm = load(path, kind, **{**usual, **arguments})
        worker = Worker(llm, Turns(llm), n_parallel, n_queue)
        worker.start()
        made.append((worker, llm))
        return worker

    yield make
    for worker, llm in made:
        worker.stop()
        worker.join()
        llm.close()


def alone(worker: Worker, *prompts) -> list[str]:
    """What is written behind each prompt when nobody else asks."""
    texts = []
    for prompt in prompts:
        log = Log()
        worker.submit(Job(wish(prompt), log))
        assert log.wait().n_written == 30
        texts.append(log.text)
    return texts


@pytest.mark.parametrize(
    "model", ["llama-gqa f16", "llama-gqa q8_0", "gemma3 f16", "gemma3 q8_0", "qwen35 f16"]
)
def test_short_questions_are_answered_while_a_book_is_read(working, text, model):
    prompts = [text(N_LONG), text(N_SHORT, 1), text(N_SHORT + 40, 2)]
    prompts = [[6 + token % 120 for token in prompt] for prompt in prompts]  # qwen35 has 128
    wanted = alone(working(model), *prompts)
    worker = working(model)
    notes = [Note(), Note()]

    def ask() -> None:
        for prompt, note in zip(prompts[1:], notes):
            worker.submit(Job(wish(prompt), note))

    book = Book(ask)
    worker.submit(Job(wish(prompts[0]), book))
    done = book.wait()
    assert [book.text, *(note.wait() and note.text for note in notes)] == wanted
    assert all(note.first_at < book.has_read_at for note in notes)
    assert (done.n_prompt, done.n_cached, done.n_written) == (N_LONG, 0, 30)
    assert worker.totals.n_prompt == sum(map(len, prompts))


def test_an_answer_under_way_goes_on_while_a_book_is_read(working, text):
    worker, prompts = working(), [text(N_LONG), text(N_SHORT, 1)]
    wanted = alone(working(), *prompts)
    book, logs = Book(lambda: None), []
    note = Note(5, lambda: worker.submit(Job(wish(prompts[0]), book)))
    worker.submit(Job(wish(prompts[1]), note))
    logs = [note, book]
    assert all(log.wait().n_written == 30 for log in logs)
    first = next(event for event in book.events if isinstance(event, Progress))
    assert first.n_done == 0 and book.has_read_at > note.last_at  # it wrote to its end meanwhile
    assert [book.text, note.text] == wanted


def test_a_second_book_waits_until_the_first_is_read(working, text):
    worker = working()
    second = Book(lambda: None)
    first = Book(lambda: worker.submit(Job(wish(text(N_LONG, 1)), second)))
    worker.submit(Job(wish(text(N_LONG)), first))
    assert first.wait().n_written == second.wait().n_written == 30
    progress = [[e for e in log.events if isinstance(e, Progress)] for log in (first, second)]
    assert progress[0][-1].n_done == N_LONG and second.has_read_at > first.has_read_at


def test_who_waits_in_the_queue_gets_a_place_that_becomes_free_meanwhile(working, text):
    """And the queue is full for one more, as ever."""
    worker, notes, refused = working(n_parallel=2, n_queue=2), [Note() for _ in range(3)], []

    def ask() -> None:
        for i, note in enumerate(notes):
            worker.submit(Job(wish(text(N_SHORT, 1 + i), n=3), note))
        with pytest.raises(ApiError) as caught:
            worker.submit(Job(wish(text(N_SHORT, 9)), Log()))
        refused.append(caught.value.status)

    book = Book(ask)
    worker.submit(Job(wish(text(N_LONG)), book))
    book.wait()
    assert all(note.wait().n_written == 3 for note in notes) and refused == [503]
    assert all(note.first_at < book.has_read_at for note in notes)


def test_the_reader_is_stopped_while_another_writes(working, text):
    worker, prompt = working(), text(N_SHORT, 1)
    wanted = alone(working(), prompt)
    jobs: list[Job] = []
    note = Note(2, lambda: worker.cancel(jobs[0]))
    book = Book(lambda: worker.submit(Job(wish(prompt), note)))
    jobs.append(Job(wish(text(N_LONG)), book))
    worker.submit(jobs[0])
    assert note.wait().n_written == 30 and [note.text] == wanted
    until(lambda: not worker.active())
    assert not book.over.is_set() and not any(isinstance(e, Written) for e in book.events)


@pytest.mark.parametrize("at", [0, 2])
def test_who_is_stopped_while_another_reads_leaves_it_alone(working, text, at):
    """At the begin of its prompt, and amid its answer."""
    worker, prompt = working(), text(N_LONG)
    wanted = alone(working(), prompt)
    note = Note(at)
    job = Job(wish(text(N_SHORT, 1), 900), note)
    note.now = lambda: worker.cancel(job)
    if at == 0:

        def emit(event) -> None:
            note(event)
            worker.cancel(job)

        job.emit = emit
    book = Book(lambda: worker.submit(job))
    worker.submit(Job(wish(prompt), book))
    assert book.wait().n_written == 30 and [book.text] == wanted
    assert note.events and not note.over.is_set() and note.n == at


def test_an_error_of_who_asks_meanwhile_is_its_own(working, text):
    worker, prompt = working(), text(N_LONG)
    wanted = alone(working(), prompt)
    bad, fault = Log(), Note(2, lambda: 1 / 0)

    def ask() -> None:
        worker.submit(Job(wish(text(N_SHORT), grammar="root ::= ("), bad))
        worker.submit(Job(wish(text(N_SHORT, 2)), fault))

    book = Book(ask)
    worker.submit(Job(wish(prompt), book))
    assert book.wait().n_written == 30 and [book.text] == wanted
    assert bad.wait().error.status == 400 and fault.wait().error.status == 500


def test_an_error_of_the_reader_is_its_own(working, text, monkeypatch):
    worker, prompts = working(), [text(N_SHORT, 1), text(N_LONG)]
    wanted = alone(working(), *prompts)
    llm = worker._llm

    def fail(*_: object) -> None:
        raise EdgeKVError("no memory")

    note = Note(3, lambda: monkeypatch.setattr(llm._kv, "_compress", fail))
    book = Book(lambda: worker.submit(Job(wish(prompts[0]), note)))
    worker.submit(Job(wish(prompts[1]), book))
    assert "no memory" in book.wait().error.message
    assert note.wait().n_written == 30 and note.text == wanted[0]
    monkeypatch.undo()
    assert alone(worker, prompts[1]) == wanted[1:]


def test_who_reads_and_who_writes_are_told_when_the_server_stops(working, text):
    worker = working()
    note = Note(2, worker.stop)
    book = Book(lambda: worker.submit(Job(wish(text(N_SHORT, 1), 900), note)))
    worker.submit(Job(wish(text(N_LONG)), book))
    assert [log.wait().error.status for log in (note, book)] == [503, 503]
    assert sum(isinstance(e, Failed) for e in [*note.events, *book.events]) == 2


def test_a_book_in_the_whole_cache_is_read_in_one_piece(working, text):
    worker, note = working(kv_ratio=1), Note()
    book = Book(lambda: worker.submit(Job(wish(text(N_SHORT, 1)), note)))
    worker.submit(Job(wish(text(N_LONG)), book))
    assert book.wait().n_written == note.wait().n_written == 30
    assert note.first_at > book.has_read_at


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(share.time, "perf_counter", lambda: self.now)


def test_half_of_the_time_is_the_readers(monkeypatch):
    clock = Clock(monkeypatch)
    mine, own, lent = Share(), 0.0, 0.0
    for i in range(200):
        clock.now += 0.05
        own += 0.05
        if left := mine.others_s():
            took = left + (i % 7) * 0.1  # the last step is not cut short
            clock.now += took + 0.01
            mine.lent(took + 0.01, took)
            lent += took + 0.01
            assert i == 0 or left > WORTH * 0.01
    assert 0.4 * own < lent <= own + 0.7


def test_time_that_nobody_wanted_is_the_readers(monkeypatch):
    clock = Clock(monkeypatch)
    mine = Share()
    clock.now = 100.0
    assert mine.others_s() == share.MOST_S
