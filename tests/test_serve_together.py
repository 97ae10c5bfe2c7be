"""Answers that are written in one pass over the weights: each is what it is alone."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from edgekv import native
from edgekv.chat.sampling import Sampling
from edgekv.chat.template import Syntax
from edgekv.errors import StepFailed
from edgekv.serve.conversations import ServerConversations
from edgekv.serve.errors import ApiError
from edgekv.serve.events import Done, Written
from edgekv.serve.job import Job
from edgekv.serve.request import Prompt, Request
from edgekv.serve.worker import Worker
from tests import archs, models
from tests.engine import load
from tests.quantized import Q8_0, quantize
from tests.serving import PATIENCE
from tests.test_drafts import Cheap

N = 4
Q4_0, Q4_1, Q4_K = 2, 3, 15
"""llama_ftype."""


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny):
    """model(name, ftype): the path of a tiny model with such weights."""
    folder = tmp_path_factory.mktemp("together")

    def make(name="llama-gqa", ftype=Q8_0):
        path = folder / f"{name}-{ftype}.gguf"
        if not path.exists():
            there = (
                tiny(name)
                if name in models.SHAPES
                else min(archs.write(folder, f"^{name}$").glob(f"{name}-*e*.gguf"))
            )
            quantize(there, path, ftype)
        return path

    return make


class Log:
    def __init__(self) -> None:
        self.events, self.over = [], threading.Event()
        self.wrote = threading.Event()

    def __call__(self, event) -> None:
        self.events.append(event)
        if isinstance(event, Written):
            self.wrote.set()
        if isinstance(event, (Done, ApiError)):
            self.over.set()

    def end(self):
        assert self.over.wait(PATIENCE)
        assert isinstance(self.events[-1], Done), self.events[-1]
        return self.events[-1]

    @property
    def said(self):
        """Every token with the exact logarithms of its rivals."""
        self.end()
        return [x for event in self.events if isinstance(event, Written) for x in event.logprobs]


@pytest.fixture
def steps(monkeypatch):
    """How many conversations each pass for several had. Turns have TURN tokens, also where it
    takes long to change conversations.
    """
    monkeypatch.setattr("edgekv.serve.worker.WORTH", 0)
    found, step = [], native.Place.step

    def counted(ctx, places, tokens):
        found.append(len(tokens))
        step(ctx, places, tokens)

    monkeypatch.setattr(native.Place, "step", counted)
    return found


@pytest.fixture
def working():
    """working(path, n_parallel, **arguments of Llama) -> a worker, which `answers` starts."""
    made = []

    def make(path, n_parallel=N, always=None, **arguments):
        arguments = {"n_ctx": 2048, "kv_ratio": 0.3, "kv_method": "snapkv", **arguments}
        llm = load(path, arguments.pop("kind", "f16"), **arguments)
        if always is None and not native.rows_alike(llm.model):
            pytest.skip("products of several tokens round otherwise on this processor")
        llm.write_together(n_parallel, always)
        worker = Worker(llm, ServerConversations(llm), n_parallel, 16)
        made.append((worker, llm))
        return worker

    yield make
    for worker, llm in made:
        worker.stop()
        if worker.silent_s < float("inf"):
            worker.join()
        worker.conversations.close()
        llm.close()


def request(prompt, n=60, **more) -> Request:
    endless = Sampling(temperature=0, logit_bias=dict.fromkeys((2, 5), float("-inf")))
    return Request(Prompt(list(prompt), syntax=Syntax()), endless, n, n_probs=3, **more)


def drawn(prompt, seed, n) -> Request:
    one = request(prompt, n)
    return replace(one, sampling=replace(one.sampling, temperature=1.0, seed=seed))


def answers(worker, requests):
    """What is said to all of them, asked at once."""
    logs = [Log() for _ in requests]
    for one, log in zip(requests, logs):
        worker.submit(Job(one, log))
    worker.start()
    return [log.said for log in logs]


CASES = {
    "f16": ("qwen2", Q4_K, {}),
    "q8_0": ("llama-gqa", Q8_0, {"kind": "q8_0"}),
    "weights with a low": ("llama-gqa", Q4_1, {}),
    "q4_0, and buffers that are compressed": (
        *("llama-gqa", Q4_0),
        {"kind": "q4_0", "kv_tail": 40},
    ),
    "all rows": ("llama-gqa", Q4_K, {"kv_ratio": 1, "kv_fast_prefill": True}),
    "windows": ("gemma3", Q8_0, {"kv_tail": 48}),
    "a basis of keys": ("qwen2-bias", Q8_0, {"kind": "q8_0"}),
    "Mamba 2": ("falcon-h1", Q8_0, {"kv_tail": 64}),
    "gated delta nets": ("qwen35", Q4_K, {"kind": "q8_0", "kv_tail": 64}),
    "short convolutions": ("lfm2", Q8_0, {}),
    "a limit of bytes": (
        "llama-gqa",
        Q8_0,
        {"kv_ratio": 1, "kv_memory": 1_000_000, "kv_tail": 128},
    ),
}


def test_an_answer_that_is_alone_guesses_and_others_are_written_together(
    working, model, text, steps
):
    """Two tokens are left, so an answer repeats itself."""
    left = dict.fromkeys(set(range(models.N_VOCAB)) - {40, 41}, float("-inf"))
    endless = Sampling(temperature=0, logit_bias=left)
    lengths = [30, 60, 150]
    requests = [
        Request(Prompt(list(text(90, i)), syntax=Syntax()), endless, n, n_probs=3)
        for i, n in enumerate(lengths)
    ]
    path = model("llama-gqa", Q4_0)
    expected = answers(working(path, 3), requests)
    n_before, worker = len(steps), working(path, 3, spec_type="auto")
    worker._llm.costs = Cheap()
    assert answers(worker, requests) == expected
    assert max(steps[n_before:]) > 1
    assert 0 < worker.totals.n_right <= worker.totals.n_drafted
    assert worker.totals.n_decodes < sum(lengths)


def test_answers_that_are_asked_for_at_once_are_written_together_from_the_beginning(
    working, model, text, steps
):
    prompts, worker = [text(80, i) for i in range(N)], working(model("llama-gqa", Q4_0))
    answers(worker, [request(one, 1) for one in prompts])  # so that little is left to read
    steps.clear()
    logs = [Log() for _ in prompts]
    for one, log in zip(prompts, logs):
        worker.submit(Job(request(one, 60), log))
    assert all(log.end().progress.n_written == 60 for log in logs)
    assert steps.count(N) > 50


@pytest.mark.parametrize("case", CASES)
def test_each_answer_is_what_it_is_alone(working, model, text, steps, case):
    name, ftype, arguments = CASES[case]
    tokens = [[x % 100 + 6 for x in text(80 + 60 * i, i)] for i in range(N)]
    requests = [request(one, 90 + 10 * i) for i, one in enumerate(tokens)]
    path = model(name, ftype)
    alone = [answers(working(path, 1, **arguments), [one])[0] for one in requests]
    assert not steps
    assert answers(working(path, **arguments), requests) == alone
    assert max(steps) == N and sum(n > 1 for n in steps) > 30


@pytest.mark.parametrize("n_written", [0, 1, 5])
def test_a_prompt_of_which_an_answer_is_under_way_gets_a_conversation_of_its_own(
    model, text, n_written
):
    llm = load(model(), "f16", n_ctx=2048, kv_ratio=0.3, kv_method="snapkv")
    llm.write_together(2, True)
    turns, prompt, answer = ServerConversations(llm), list(text(300)), list(text(6, 1))[:n_written]
    assert turns.begin_answer(Prompt(prompt)) == 0
    llm.eval(prompt)
    for token in answer:
        llm.eval([token])
    first = turns.current_id
    llm.eval(prompt[turns.begin_answer(Prompt(prompt)) :])
    second = turns.current_id
    assert second != first
    llm.eval([7])
    said = [*prompt, *answer]
    assert turns.resume_answer(first, [*said, 9], Prompt(prompt)) == len(said)
    assert turns.current_id == first and llm.tokens.tolist() == said
    assert turns.together([first, second]) == [first, second]
    turns.close()


def test_answers_to_one_prompt_are_what_they_are_alone(working, model, text, steps):
    """Asked at once, amid the first words of other answers, and as they end."""
    path, prompt = model(), text(300)
    requests = [drawn(prompt, seed, 60 + 9 * seed) for seed in range(N)]
    alone = [answers(working(path, 1), [one])[0] for one in requests]
    for n_first in range(1, N):
        worker, logs = working(path), [Log() for _ in requests]
        for i, (one, log) in enumerate(zip(requests, logs)):
            worker.submit(Job(one, log))
            if i + 1 == n_first:
                worker.start()
                assert log.wrote.wait(PATIENCE)
        assert [log.said for log in logs] == alone
    assert max(steps) == N


def test_a_question_goes_on_from_an_answer_that_was_written_beside_others(working, model, text):
    path, prompts = model(), [text(150, i) for i in range(N)]

    def second(worker, is_alone):
        first = [request(one, 50) for one in prompts]
        logs = []
        for i, one in enumerate(first):
            logs.append(Log())
            worker.submit(Job(one, logs[-1]))
            if i == 0:
                worker.start()
            if is_alone:
                logs[-1].end()
        dones = [log.end() for log in logs]
        after = [
            request([*one, *done.tokens, *text(30, 9)])
            for one, done in zip(prompts, dones, strict=True)
        ]
        again = [Log() for _ in after]
        for one, log in zip(after, again):
            worker.submit(Job(one, log))
            if is_alone:
                log.end()
        assert all(log.end().progress.n_cached >= 190 for log in again)
        return [log.said for log in again]

    assert second(working(path), False) == second(working(path, 1), True)


def test_one_that_leaves_and_one_that_comes_change_no_other(working, model, text, steps):
    path, prompts = model(), [text(150, i) for i in range(N + 1)]
    alone = [answers(working(path, 1), [request(one, 120)])[0] for one in prompts]
    worker, logs = working(path), [Log() for _ in prompts]
    jobs = [Job(request(one, 120), log) for one, log in zip(prompts, logs)]
    for job in jobs[:N]:
        worker.submit(job)
    worker.start()
    assert logs[1].wrote.wait(PATIENCE)
    worker.cancel(jobs[1])
    worker.submit(jobs[N])
    for i in (0, 2, 3, 4):
        assert logs[i].said == alone[i]
    assert len(logs[1].events) < 125 and steps


def test_a_pass_that_fails_leaves_answers_to_be_written_one_by_one(
    working, model, text, monkeypatch
):
    path, requests = model(), [request(text(100, i), 40) for i in range(N)]
    alone = [answers(working(path, 1), [one])[0] for one in requests]
    step, calls = native.Place.step, []

    def fails(ctx, places, tokens):
        calls.append(len(places))
        if len(calls) % 3 == 0:
            raise StepFailed("no memory")
        step(ctx, places, tokens)

    monkeypatch.setattr(native.Place, "step", fails)
    assert answers(working(path), requests) == alone
    assert len(calls) > 6


@pytest.mark.parametrize("always", [True, False])
def test_answers_that_would_differ_are_written_together_where_asked(
    working, tiny, text, steps, always
):
    answers(
        working(tiny("llama-gqa"), always=always), [request(text(100, i), 90) for i in range(N)]
    )
    assert max(steps, default=0) == (N if always else 0)


def test_answers_that_would_differ_are_not_alike(tiny):
    with load(tiny("llama-gqa"), kv_ratio=0.3) as llm:
        assert not native.rows_alike(llm.model)
