"""While a long prompt is read, others are answered, and each answer is as if it were alone."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from edgekv.conversation.pool import Conversations
from edgekv.errors import EdgeKVError
from edgekv.native import Prefill
from edgekv.serve import job as jobs
from edgekv.serve.conversations import ServerConversations
from edgekv.serve.errors import ApiError
from edgekv.serve.events import Done, Event, Progress, Written
from edgekv.serve.job import Job
from edgekv.serve.options import ServeOptions
from edgekv.serve.request import Prompt
from edgekv.serve.share import Share
from edgekv.serve.worker import Worker
from tests import archs
from tests.engine import load
from tests.serving import get, post, serving, until
from tests.test_serve_worker import Log, request

N_LONG, N_SHORT = 900, 40


def some(n: int, seed: int = 0) -> list[int]:
    """Tokens that each of the tiny models has."""
    return np.random.default_rng(seed).integers(6, 128, n).tolist()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return archs.write(tmp_path_factory.mktemp("archs"), "^qwen35$") / "qwen35-dense.gguf"


@pytest.fixture
def working(tiny, hybrid) -> Iterator[Callable[..., Worker]]:
    """working(model, type, n_parallel, n_queue, **arguments of Llama), which are ended."""
    made = []

    def make(
        name="llama-gqa", kind="f16", n_parallel=4, n_queue=4, cache_ram=None, **more
    ) -> Worker:
        path = hybrid if name == "qwen35" else tiny(name)
        settings = {"kv_ratio": 0.5, "n_ctx": 2048, "n_ubatch": 64, "n_batch": 64, **more}
        llm = load(path, kind, **settings)
        worker = Worker(llm, ServerConversations(llm, cache_ram), n_parallel, n_queue)
        worker.start()
        made.append((worker, llm))
        return worker

    yield make
    for worker, llm in made:
        worker.stop()
        worker.join()
        llm.close()


@pytest.fixture
def eager(monkeypatch):
    """Others have a turn behind each chunk, however little time the reader has had."""
    monkeypatch.setattr(Share, "until", lambda self: 0.0)


class Shared(Log):
    """Takes a job's events, notes its name with each in a list for several jobs, and calls
    `when[n]` once n events of progress have come.
    """

    def __init__(self, name="", order=None, when: dict[int, Callable[[], None]] | None = None):
        super().__init__()
        self.name, self.order, self.when = name, [] if order is None else order, when or {}
        self.n_progress = 0

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        self.order.append((self.name, type(event)))
        if isinstance(event, Progress):
            self.n_progress += 1
            self.when.pop(self.n_progress, lambda: None)()

    @property
    def told(self) -> list[object]:
        """What was written, with the log-probabilities of it and of its rivals."""
        return [event for event in self.events if isinstance(event, Written)]


def asked(tokens, n=12):
    return request(tokens, n, n_probs=3)


def alone(worker: Worker, tokens, n=12) -> list[object]:
    log = Shared()
    worker.submit(Job(asked(tokens, n), log))
    assert log.wait().progress.n_written == n
    return log.told


@pytest.mark.parametrize(
    "model", ["llama-gqa f16", "llama-gqa q8_0", "gemma3 f16", "gemma3 q8_0", "qwen35 f16"]
)
def test_short_prompts_are_answered_while_a_long_one_is_read(working, model, eager):
    check_that_others_are_answered(working, *model.split())


@pytest.mark.parametrize(
    "more",
    [
        {"kv_method": "kvzip"},
        {"kv_method": "d2o"},
        {"kv_method": "score=keydiff,budget=pooled,merge=summary"},
        {"kv_hidden": "whole"},
        {"kv_hidden": "disk"},
        {"kv_tail": 8, "kv_window": 4},
    ],
    ids=str,
)
def test_it_is_so_however_prompts_are_read(working, more, eager):
    check_that_others_are_answered(working, **more)


def check_that_others_are_answered(working, *model, **more):
    long, shorts = some(N_LONG), [some(N_SHORT, seed) for seed in (1, 2)]
    wanted = [alone(working(*model, **more), tokens) for tokens in (long, *shorts)]
    worker, order = working(*model, **more), []
    logs = [Shared(n, order) for n in ("first", "second")]
    jobs = [Job(asked(tokens), log) for tokens, log in zip(shorts, logs)]
    # one comes at once, one amid the layers
    reader = Shared("long", order, {2: lambda: worker.submit(jobs[0])})
    reader.when[10] = lambda: worker.submit(jobs[1])
    worker.submit(Job(asked(long), reader))
    ends = [log.wait() for log in (reader, *logs)]
    assert order.index(("first", Done)) < order.index(("second", Done))
    assert order.index(("second", Done)) < order.index(("long", Written))
    assert [log.told for log in (reader, *logs)] == wanted
    assert [(end.progress.n_prompt, end.progress.n_cached) for end in ends] == [
        (N_LONG, 0),
        *[(N_SHORT, 0)] * 2,
    ]


def busy(worker: Worker, guest: Shared, tokens=None, at=4) -> tuple[Shared, Job, Job]:
    """A long prompt is read, and `guest` gets the answer to a prompt that comes amid it. Returns
    the reader's log, and both jobs.
    """
    tokens = some(N_SHORT, 1) if tokens is None else tokens
    job = Job(asked(tokens, 40), guest)
    log = Shared("long", guest.order, {at: lambda: worker.submit(job)})
    reader = Job(asked(some(N_LONG)), log)
    worker.submit(reader)
    return log, reader, job


class Acting(Shared):
    """Does something at the n-th event of a kind."""

    def __init__(self, act: Callable[[], None], kind: type = Written, n: int = 3) -> None:
        super().__init__("guest")
        self.act, self.kind, self.n = act, kind, n

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if sum(isinstance(x, self.kind) for x in self.events) == self.n:
            act, self.act = self.act, lambda: None
            act()


@pytest.mark.parametrize("model", ["llama-gqa q8_0", "gemma3 f16", "qwen35 f16"])
def test_an_answer_that_was_begun_goes_on_while_a_prompt_is_read(working, model, eager):
    name, kind = model.split()
    first = some(300, 1)
    wanted = [alone(working(name, kind), some(N_LONG)), alone(working(name, kind), first, 40)]
    worker = working(name, kind)
    writer = Acting(lambda: worker.submit(reader))
    log = Shared("long", writer.order)
    reader = Job(asked(some(N_LONG)), log)
    worker.submit(Job(asked(first, 40), writer))
    assert writer.wait() and log.wait() and [log.told, writer.told] == wanted
    order = writer.order
    assert order.index(("long", Progress)) < order.index(("guest", Done))
    assert order.index(("guest", Done)) < order.index(("long", Written))


def test_others_that_are_read_again_do_not_count_as_progress(working, eager, monkeypatch):
    """Where there is no memory for it, an answer's prompt is read before each turn."""
    monkeypatch.setattr(Conversations, "hold", lambda pool: None)
    worker, guest = working(cache_ram=0), Shared("guest")
    log, _, _ = busy(worker, guest, some(60, 1))
    assert log.wait() and guest.wait()
    n_done = [event.n_read for event in log.events if isinstance(event, Progress)]
    assert n_done == sorted(n_done) and n_done[-1] == N_LONG
    assert log.order.index(("guest", Written)) < log.order.index(("long", Written))


AMID = pytest.mark.parametrize("kind, n", [(Progress, 1), (Written, 3)])
"""The other one's prompt is going to be read, or its answer is written."""


@AMID
def test_who_reads_is_stopped_while_another_one_is_answered(working, eager, kind, n):
    wanted = [alone(working(), some(N_LONG)), alone(working(), some(N_SHORT, 1), 40)]
    worker = working()
    guest = Acting(lambda: worker.cancel(reader), kind, n)
    log, reader, _ = busy(worker, guest)
    assert guest.wait().progress.n_written == 40 and guest.told == wanted[1]
    until(lambda: not worker.active())
    assert not log.over.is_set() and not log.told
    assert guest.order[-1] == ("guest", Done)
    assert alone(worker, some(N_LONG)) == wanted[0]


@AMID
def test_who_is_answered_meanwhile_is_stopped(working, eager, kind, n):
    wanted = alone(working(), some(N_LONG))
    worker = working()
    guest = Acting(lambda: worker.cancel(job), kind, n)
    log, _, job = busy(worker, guest)
    assert log.wait().progress.n_written == 12 and log.told == wanted
    assert not guest.over.is_set() and isinstance(guest.events[-1], kind)


@pytest.mark.parametrize("grammar", ["root ::= (", 'root ::= "a" [\\U00FFFFFF]'])
def test_an_error_of_another_one_does_not_reach_who_reads(working, eager, grammar):
    wanted = alone(working(), some(N_LONG))
    worker, failed = working(), Shared("failed")
    bad = Job(request(some(N_SHORT, 1), constraint={"grammar": grammar}), failed)
    log = Shared("long", failed.order, {4: lambda: worker.submit(bad)})
    worker.submit(Job(asked(some(N_LONG)), log))
    assert isinstance(failed.wait(), ApiError)
    assert log.wait().progress.n_written == 12 and log.told == wanted
    assert log.order.index(("failed", ApiError)) < log.order.index(("long", Written))


def test_an_error_of_who_reads_does_not_reach_others(working, eager, monkeypatch):
    wanted = [alone(working(), some(N_LONG)), alone(working(), some(N_SHORT, 1), 40)]
    worker, guest = working(), Shared("guest")

    def resume(self) -> None:
        raise EdgeKVError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(Prefill, "resume", resume)
        log, _, _ = busy(worker, guest)
        assert log.wait().message == "no memory" and not log.told
    assert guest.wait().progress.n_written == 40 and guest.told == wanted[1]
    assert alone(worker, some(N_LONG)) == wanted[0]


def test_an_error_in_comparing_a_prompt_does_not_reach_who_reads(working, eager, monkeypatch):
    wanted = alone(working(), some(N_LONG))
    worker, guest = working(), Shared("guest")

    def settled(self, prompt: Prompt) -> Prompt:
        if len(prompt.tokens) == 300:
            raise EdgeKVError("no such text")
        return prompt

    monkeypatch.setattr(ServerConversations, "settled", settled)
    log, _, _ = busy(worker, guest, some(300, 1))
    assert guest.wait().message == "no such text"
    assert log.wait().progress.n_written == 12 and log.told == wanted
    assert log.order.index(("guest", ApiError)) < log.order.index(("long", Written))


def test_a_fault_in_another_one_does_not_reach_who_reads(working, eager):
    wanted = alone(working(), some(N_LONG))
    worker = working()
    guest = Acting(lambda: 1 // 0)
    log, _, _ = busy(worker, guest)
    assert log.wait().progress.n_written == 12 and log.told == wanted
    assert guest.wait().status == 500


@AMID
def test_the_server_stops_while_another_one_is_answered(working, eager, kind, n):
    worker = working()
    guest = Acting(lambda: worker.stop(), kind, n)
    log, _, _ = busy(worker, guest)
    assert [x.wait().status for x in (log, guest)] == [503, 503]


def test_a_full_queue_is_full_while_a_prompt_is_read(working, eager):
    worker, order = working(n_parallel=2, n_queue=1), []
    logs, refused = [Shared(n, order) for n in ("second", "third")], []

    def come() -> None:
        for seed, log in enumerate(logs, 1):
            worker.submit(Job(asked(some(N_SHORT, seed)), log))
        with pytest.raises(ApiError) as caught:
            worker.submit(Job(asked(some(N_SHORT, 3)), Shared()))
        refused.append(caught.value.status)

    log = Shared("long", order, {4: come})
    worker.submit(Job(asked(some(N_LONG)), log))
    assert [x.wait().progress.n_written for x in (log, *logs)] == [12] * 3 and refused == [503]
    # who waited takes the place of the one that was answered
    assert order.index(("third", Done)) < order.index(("long", Written))


def test_long_prompts_wait_until_another_one_is_read(working, eager):
    wanted = [alone(working(), some(N_LONG, seed), n) for seed, n in ((0, 12), (1, 40))]
    worker, second = working(), Shared("second")
    log, _, _ = busy(worker, second, some(N_LONG, 1))
    assert log.wait() and second.wait()
    order = second.order
    assert order.index(("long", Written)) < order.index(("second", Progress))
    assert log.told == wanted[0] and second.told == wanted[1]


def test_a_long_conversation_goes_on_with_a_short_question(working, eager):
    """It is what would have to be read that counts."""
    first, more = some(300, 1), some(20, 2)
    worker, guest = working(), Shared("guest")
    alone(worker, first, 1)
    log, _, _ = busy(worker, guest, [*first, *more])
    assert log.wait() and guest.wait().progress.n_cached >= 300
    assert log.order.index(("guest", Done)) < log.order.index(("long", Written))


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen35"])
def test_a_conversation_goes_on_behind_what_was_read_in_parts(working, eager, name):
    """The earlier turn and the parts of a prompt are there when the prompt is read on."""
    first, document, question = some(300, 1), some(500), some(90, 2)
    prompt = Prompt([*first, *document, *question], cuts=(300, 800))
    whole = replace(asked(prompt.tokens), prompt=prompt)
    told, ends = [], []
    for disturbed in (False, True):
        worker = working(name)
        alone(worker, first, 1)
        guest = Shared("guest")
        come = partial(worker.submit, Job(asked(some(N_SHORT, 3)), guest))
        log = Shared("long", guest.order, {12: come} if disturbed else {})
        worker.submit(Job(whole, log))
        ends.append(log.wait().progress.n_cached)
        if disturbed:
            assert log.order.index(("guest", Done)) < log.order.index(("long", Written))
        told.append(log.told)
        log = Shared()  # another question about the document
        worker.submit(Job(asked([*first, *document, *some(50, 4)]), log))
        ends.append(log.wait().progress.n_cached)
        told.append(log.told)
    assert told[:2] == told[2:] and ends[:2] == ends[2:]


def test_llama_cpps_own_cache_keeps_others_waiting(working, eager):
    worker, guest = working(kv_ratio=1), Shared("guest")
    log, _, _ = busy(worker, guest)
    assert log.wait() and guest.wait()
    assert log.order.index(("long", Written)) < log.order.index(("guest", Progress))


def test_a_call_waits_until_the_prompt_is_read(working, eager):
    worker, guest, seen = working(), Shared("guest"), []
    log, _, _ = busy(worker, guest)
    log.when[2] = lambda: seen.append(
        worker.call(lambda: [kind for name, kind in log.order if name == "guest"])
    )
    assert log.wait() and guest.wait() and Done in seen[0].result()


def test_others_have_at_most_as_much_time_as_who_reads():
    now = [0.0]
    share = Share(lambda: now[0])
    now[0] = 0.5
    assert share.until() == 1.0
    now[0] = 1.25  # three quarters of a second, of which 25 ms went into changing conversations
    share.lent(0.5, 0.725)
    assert share.until() is None
    now[0] = 1.75  # the reader has had one second: what is left is as much as is worth it
    assert share.until() is None
    now[0] = 1.8
    assert share.until() == pytest.approx(2.1)


def test_time_that_nobody_used_does_not_add_up():
    now = [0.0]
    share = Share(lambda: now[0])
    now[0] = 300.0
    assert share.until() == 301.0
    now[0] = 302.0
    share.lent(300.0, 1.8)  # changing conversations took 0.2 s: a second would not be worth it
    assert share.until() == 304.0


@pytest.mark.parametrize("seed", [1, 2])
def test_answers_of_many_long_and_short_prompts_are_those_of_each_alone(working, seed):
    """Some are stopped, whatever the worker does just then."""
    rng, jobs = random.Random(seed), list[tuple[int, Job, Shared]]()
    prompts = [some(n, seed=n) for n in (20, 60, 300, 700)]
    right = [tokens_of(alone(working(), tokens)) for tokens in prompts]
    worker = working(n_queue=100)
    for _ in range(24):
        i = rng.randrange(len(prompts))
        log = Shared()
        jobs.append((i, Job(asked(prompts[i]), log), log))
        worker.submit(jobs[-1][1])
        time.sleep(0.01 * rng.random())
        if rng.random() < 0.3:
            worker.cancel(rng.choice(jobs)[1])
    whole = [(i, log) for i, job, log in jobs if not job.is_cancelled]
    assert len(whole) > 10
    for i, log in whole:
        assert log.wait() and tokens_of(log.told) == right[i]


def tokens_of(told: list[object]) -> list[int]:
    return [one.token for written in told for one in written.logprobs]


def test_time_that_was_lent_to_others_is_not_the_readers(working, eager):
    """What a prompt took to read is what it took of the model."""
    worker = working()
    slept = list[float]()

    def slow(event: Event) -> None:
        slept.append(0.3)
        time.sleep(0.3)

    reader = Shared(when={2: lambda: worker.submit(Job(asked(some(N_SHORT, 1), 2), slow))})
    begin = time.perf_counter()
    worker.submit(Job(asked(some(N_LONG)), reader))
    done = reader.wait()
    assert sum(slept) > 1
    most = 1e3 * (time.perf_counter() - begin - sum(slept))
    assert done.progress.read_ms <= most
    assert max(event.read_ms for event in reader.events if isinstance(event, Progress)) <= most


def test_no_number_counts_time_that_was_lent(tiny, monkeypatch):
    """By a clock that stands still but while others are let in."""
    now = [0.0]
    monkeypatch.setattr(jobs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Worker, "_let_others", lambda self: now.append(now.pop() + 7.0))
    options = ServeOptions(metrics=True)
    with serving(tiny("llama-gqa"), options, kv_ratio=0.5, n_ubatch=64) as (url, _):
        body = {"prompt": some(N_LONG), "n_predict": 4, "stream": True, "return_progress": True}
        said = post(f"{url}/completion", json=body).text
        metrics = get(f"{url}/metrics").text
        slots = get(f"{url}/slots").text
    assert now[0] > 7.0
    assert re.findall(r'"time_ms":\s*(\d+)', said) and not re.search(r'"time_ms":\s*[1-9]', said)
    assert re.search(r'"prompt_ms":\s*0.0', said) and re.search(r'"predicted_ms":\s*0.0', said)
    for name in ("prompt_seconds", "tokens_predicted_seconds"):
        assert f"llamacpp:{name}_total 0.0" in metrics
    assert "_ms" not in slots
