"""A draft model: answers are those without it, and its cache follows the texts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from edgekv.chat.drafts import MODEL, Costs, Drafting
from edgekv.chat.guesses import Guesses
from edgekv.errors import BadInput, Cancelled, StepFailed
from edgekv.llama.draft_model import DraftModel
from edgekv.serve.conversations import ServerConversations
from edgekv.serve.events import Done
from edgekv.serve.job import Job
from edgekv.serve.worker import Worker
from tests.engine import load
from tests.recurrent import write as write_recurrent
from tests.test_drafts import NEAR, Cheap, written, written_and_seen
from tests.test_serve_worker import Log, request


def with_draft(path, draft, **more):
    llm = load(path, spec_draft_model=str(draft), **more)
    llm.costs = llm.draft._costs = Cheap()
    return llm


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen2"])
@pytest.mark.parametrize("draft", ["llama-gqa", "gemma3"])
@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_answers_are_those_without_a_draft_model(tiny, text, name, draft, ratio):
    """By the model itself nearly all guesses are right, by another one nearly none."""
    more = dict(kv_ratio=ratio, kv_tail=40)
    alone, llm = load(tiny(name), **more), with_draft(tiny(name), tiny(draft), **more)
    for seed in range(3):
        prompt = text(100 + 60 * seed, seed=seed)
        expected, seen = written_and_seen(alone, prompt, 60)
        before = llm.n_evaluated
        got, _ = written_and_seen(llm, prompt, 60)
        n_same = next((i for i, (x, y) in enumerate(zip(got, expected)) if x != y), 59)
        last = seen[n_same]
        assert last[expected[n_same]] - last[got[n_same]] < NEAR * last.std()
        assert llm.n_evaluated - before >= len(prompt) + 59
        llm.reset()
        alone.reset()
    assert llm.draft.llm.n_evaluated > 60


@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_its_cache_goes_on_with_the_conversation(tiny, text, ratio):
    llm = with_draft(tiny("llama-gqa"), tiny("llama-gqa"), kv_ratio=ratio)
    prompt = text(200)
    said = written(llm, prompt, 60)
    draft = llm.draft.llm
    n_read, n_checked = draft.n_evaluated, llm.n_evaluated
    if ratio == 1.0:  # a compressed cache is another one where more is read at once
        assert 200 + 40 < n_read < 200 + 90, "each token once, and what was wrong"
        assert n_checked < 200 + 80, "its guesses are right"
    turn = [*prompt, *said, *text(20, seed=5)]
    written(llm, turn, 40)
    assert draft.n_evaluated - n_read < (120 if ratio == 1 else 60 * 16)
    assert draft.tokens[:250].tolist() == turn[:250]


def test_it_guesses_what_it_would_write(tiny, text):
    llm, other = load(tiny("llama-gqa")), load(tiny("llama-gqa"))
    model, prompt, user = DraftModel(other, llm.n_vocab(), Costs()), text(90), object()
    expected = written(llm, prompt, 12)
    for begin in (0, 5, 3):  # behind a text that goes on, or goes on otherwise
        tokens, found = [*prompt, *expected[:begin]], []
        assert model.follow(tokens, user if begin != 3 else object()) > 8
        for _ in range(6):
            token, p = model.likeliest()
            assert 0 < p < 1
            found.append(token)
            model.take(token)
        assert found == expected[begin : begin + 6]


def test_a_conversation_that_is_loaded_goes_on(tiny, text, tmp_path):
    llm = with_draft(tiny("llama-gqa"), tiny("qwen2"), kv_ratio=0.5)
    prompt, file = text(120), str(tmp_path / "saved")
    first = written(llm, prompt, 30)
    llm.kv_save(file)
    expected = written(llm, [*prompt, *first, 7, 8, 9], 30)
    written(llm, text(80, seed=9), 30)
    llm.kv_load(file)
    assert written(llm, [*prompt, *first, 7, 8, 9], 30) == expected


def test_cancelling_ends_what_it_reads(tiny, text, monkeypatch):
    llm = with_draft(tiny("llama-gqa"), tiny("qwen2"))
    prompt = text(100)
    expected = written(llm, prompt, 40)
    llm.reset()
    draft, inner = llm.draft.llm, llm.draft.llm.eval

    def late(tokens):
        llm.kv_cancel()
        inner(tokens)

    draft.reset()
    monkeypatch.setattr(draft, "eval", late)
    with pytest.raises(Cancelled):
        written(llm, prompt, 40)
    monkeypatch.undo()
    assert written(llm, prompt, 40) == expected


def test_an_answer_needs_no_draft(tiny, text, monkeypatch):
    llm = with_draft(tiny("llama-gqa"), tiny("qwen2"))
    expected = written(load(tiny("llama-gqa")), text(100), 40)

    def fail(tokens):
        raise StepFailed("no memory")

    monkeypatch.setattr(llm.draft.llm, "eval", fail)
    assert written(llm, text(100), 40) == expected


def test_drawn_tokens_have_the_same_distribution(tiny, text):
    """Counts of two tokens behind one prompt, with seeds of their own on each side."""
    few, n = [40, 41, 42], 400

    def process(input_ids, logits):
        out = np.full_like(logits, -np.inf)
        out[few] = logits[few] / 4
        return out

    def counted(llm, seeds):
        found: Counter[tuple[int, ...]] = Counter()
        for seed in seeds:
            llm.set_seed(seed)
            more = dict(temp=1.0, top_p=1.0, min_p=0.0, logits_processor=[process])
            found[tuple(written(llm, text(24), 6, **more)[-2:])] += 1
        return found

    llm = with_draft(tiny("llama-gqa"), tiny("qwen2"))
    made, n_drafted = llm._kv_draft, 0

    def among_few(tokens):
        nonlocal n_drafted
        draft = made(tokens)
        n_drafted += len(draft)
        return np.array([few[token % 3] for token in draft], np.intc)

    llm._kv_draft = among_few
    with_drafts = counted(llm, range(n))
    alone = counted(load(tiny("llama-gqa")), range(10_000, 10_000 + n))
    assert n_drafted > n, "nothing was drafted"
    pairs = set(alone) | set(with_drafts)
    chi2 = sum((alone[x] - with_drafts[x]) ** 2 / (alone[x] + with_drafts[x]) for x in pairs)
    assert len(pairs) > 4 and chi2 < 30, "8 degrees of freedom: 26 is one of a thousand"


def answers(tiny, prompts, n_parallel: int, **more):
    llm = load(tiny("llama-gqa"), n_ctx=1024, **more)
    llm.costs = Cheap()
    if llm.draft:
        llm.draft._costs = llm.costs
    worker = Worker(llm, ServerConversations(llm), n_parallel)
    worker.start()
    try:
        logs = [Log() for _ in prompts]
        for prompt, log in zip(prompts, logs):
            worker.submit(Job(request(prompt, 90), log))
        done = [(log.wait(), log.text) for log in logs]
        return done, worker.totals, llm.draft and llm.draft.llm.n_evaluated
    finally:
        worker.stop()
        worker.join()
        llm.close()


@pytest.mark.parametrize("n_parallel", [1, 3])
def test_a_server_writes_the_same(tiny, text, n_parallel):
    prompts = [text(120, seed) for seed in range(3)]
    expected, _, _ = answers(tiny, prompts, 1)
    draft = str(tiny("llama-gqa"))
    got, totals, n_read = answers(tiny, prompts, n_parallel, spec_draft_model=draft)
    assert [said for _, said in got] == [said for _, said in expected]
    assert all(isinstance(done, Done) for done, _ in got)
    assert totals.n_right > 0.7 * totals.n_drafted > 70
    assert n_read < 3 * (120 + 200), "conversations that take turns are not read again"


def test_its_bytes_are_counted(tiny, text):
    alone, llm = load(tiny("llama-gqa")), with_draft(tiny("llama-gqa"), tiny("qwen2"))
    for x in (alone, llm):
        written(x, text(100), 40)
    assert alone.kv_stats().n_bytes_draft == 0
    assert llm.kv_stats().n_bytes_draft == llm.draft.llm.kv_stats().n_bytes > 0
    assert llm.kv_stats().n_bytes == alone.kv_stats().n_bytes


def test_it_keeps_the_share_that_its_model_keeps(tiny, text):
    llm = with_draft(tiny("llama-gqa"), tiny("qwen2"), kv_ratio=0.3)
    written(llm, text(400), 40)
    stats = llm.draft.llm.kv_stats()
    assert stats.ratio == 0.3 and stats.n_bytes_used < 0.5 * stats.n_bytes_full


def test_a_model_of_another_vocabulary_is_refused(tiny, tmp_path, demo_model):
    path, other = str(tiny("llama-gqa")), tmp_path / "other.gguf"
    data = tiny("qwen2").read_bytes()
    assert data.count("▁the".encode()) == 1
    other.write_bytes(data.replace("▁the".encode(), "▁eht".encode()))
    for draft, why in ((other, "token 2.. differs"), (demo_model, "vocabular")):
        with pytest.raises(BadInput, match=f"{why}.*same family"):
            load(path, spec_draft_model=str(draft))


def test_what_cannot_go_back_is_refused(tiny, tmp_path):
    recurrent = write_recurrent(tmp_path / "recurrent.gguf")
    with pytest.raises(BadInput):
        load(tiny("llama-gqa"), spec_draft_model=str(recurrent))
    with pytest.raises(BadInput, match="recurrent"):
        load(recurrent, spec_draft_model=str(recurrent))


@pytest.mark.parametrize(
    "wrong",
    [
        dict(type=MODEL),
        dict(type="ngram-simple", draft_model="x"),
        dict(draft_model="x", draft_n_max=-1),
        dict(draft_model="x", draft_p_min=1.5),
    ],
)
def test_options_that_go_not_together_are_refused(wrong):
    with pytest.raises(BadInput):
        Drafting(**wrong)


def test_a_model_without_a_type_is_asked():
    assert Drafting(draft_model="x").types == [MODEL]
    both = Drafting("ngram-simple,draft-simple", draft_model="x")
    assert both.types == ["ngram-simple", MODEL] and both.is_on


# ---- how long a draft is


class Fake:
    """A draft model that counts up, and is as sure as it is told."""

    def __init__(self, p: float = 0.9, n_missing: int = 0) -> None:
        self.p, self.n_missing_, self.n_taken, self.last = p, n_missing, 0, 0

    def n_missing(self, tokens, user):
        return self.n_missing_

    def follow(self, tokens, user):
        self.last = tokens[-1]
        return 99

    def likeliest(self):
        return self.last + 1, self.p

    def take(self, token):
        self.last, self.n_taken = token, self.n_taken + 1


def costing(one: float, more: float, guess: float) -> Costs:
    """A pass takes one, and more for each further token; a guess takes guess."""
    costs = Costs()
    costs.took(1, one)
    costs.took(16, one + 15 * more)
    costs.guess = guess
    return costs


def text_of(guesses: Guesses, n: int, is_right: bool) -> list[int]:
    """Lengths of the drafts of a text of n tokens."""
    tokens, lengths = [0], list[int]()
    while len(tokens) < n:
        draft = guesses.next(tokens, 31)
        lengths.append(len(draft))
        tokens += draft if is_right else []
        tokens.append(tokens[-1] + (1 if is_right else 2))
    return lengths


def test_a_draft_is_long_where_guesses_are_right_and_cheap():
    cheap = costing(10, 0.5, 0.5)
    right = text_of(Guesses(Drafting(draft_model="x"), cheap, Fake()), 400, True)
    assert np.mean(right[-5:]) > 10
    wrong = text_of(Guesses(Drafting(draft_model="x"), cheap, Fake()), 400, False)
    assert np.mean(wrong[-50:]) < 2


def test_there_is_none_where_it_cannot_pay():
    model = Fake()
    never = costing(10, 3, 9)
    assert not any(text_of(Guesses(Drafting(draft_model="x"), never, model), 400, True)[2:])
    assert model.n_taken == 0


def test_where_guesses_are_wrong_one_is_tried_now_and_then():
    model = Fake(p=0.99)
    lengths = text_of(Guesses(Drafting(draft_model="x"), costing(10, 6, 1), model), 2000, False)
    tried = [i for i, n in enumerate(lengths) if n]
    assert 3 < len(tried) < 60 and 1990 - tried[-1] < 700


def test_limits_hold():
    cheap = costing(10, 0.1, 0.1)
    for limit, most in (dict(draft_n_max=3), 3), (dict(draft_n_max=0), 0):
        lengths = text_of(Guesses(Drafting(draft_model="x", **limit), cheap, Fake()), 100, True)
        assert max(lengths) == most
    unsure = dict(draft_p_min=0.95)
    assert not any(text_of(Guesses(Drafting(draft_model="x", **unsure), cheap, Fake()), 50, True))
    short = Guesses(Drafting(draft_model="x", draft_n_min=5, draft_n_max=4), cheap, Fake())
    assert not any(text_of(short, 50, True))


def test_a_short_answer_behind_a_long_text_is_over_before_it_is_read():
    cheap = costing(10, 0.1, 0.1)
    cheap.read = 1.0
    lengths = text_of(Guesses(Drafting(draft_model="x"), cheap, Fake(n_missing=200)), 60, True)
    assert not any(lengths[:19]) and lengths[20] > 0
