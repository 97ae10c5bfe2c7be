"""While a long prompt is read, others are answered, and each answer is as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from edgekv.serve.conversations import Turns
from edgekv.serve.events import Done, Event, Progress, Written
from edgekv.serve.share import Share
from edgekv.serve.worker import Job, Worker
from tests import archs
from tests.engine import load
from tests.test_serve_worker import Log, wish

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

    def make(name="llama-gqa", kind="f16", n_parallel=4, n_queue=4, **more) -> Worker:
        path = hybrid if name == "qwen35" else tiny(name)
        settings = {"kv_ratio": 0.5, "n_ctx": 2048, "n_ubatch": 64, "n_batch": 64, **more}
        llm = load(path, kind, **settings)
        worker = Worker(llm, Turns(llm), n_parallel, n_queue)
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
    return wish(tokens, n, n_probs=3)


def alone(worker: Worker, tokens, n=12) -> list[object]:
    log = Shared()
    worker.submit(Job(asked(tokens, n), log))
    assert log.wait().n_written == n
    return log.told


@pytest.mark.parametrize(
    "model", ["llama-gqa f16", "llama-gqa q8_0", "gemma3 f16", "gemma3 q8_0", "qwen35 f16"]
)
def test_short_prompts_are_answered_while_a_long_one_is_read(working, model, eager):
    name, kind = model.split()
    long, shorts = some(N_LONG), [some(N_SHORT, seed) for seed in (1, 2)]
    wanted = [alone(working(name, kind), tokens) for tokens in (long, *shorts)]
    worker, order = working(name, kind), []
    logs = [Shared(n, order) for n in ("first", "second")]
    jobs = [Job(asked(tokens), log) for tokens, log in zip(shorts, logs)]
    # one comes at once, one amid the layers
    reader = Shared("long", order, {2: lambda: worker.submit(jobs[0])})
    reader.when[20] = lambda: worker.submit(jobs[1])
    worker.submit(Job(asked(long), reader))
    ends = [log.wait() for log in (reader, *logs)]
    assert order.index(("first", Done)) < order.index(("second", Done))
    assert order.index(("second", Done)) < order.index(("long", Written))
    assert [log.told for log in (reader, *logs)] == wanted
    assert [(end.n_prompt, end.n_cached) for end in ends] == [(N_LONG, 0), *[(N_SHORT, 0)] * 2]
