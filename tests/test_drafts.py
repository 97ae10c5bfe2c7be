"""Drafts: answers are those without them, and what was wrong of one leaves nothing behind."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from edgekv import native
from edgekv.chat.drafts import MOST, Costs, Drafting
from edgekv.chat.ngrams import Ngrams
from edgekv.chat.source import Words
from edgekv.conversation import state
from edgekv.errors import BadInput
from edgekv.serve.conversations import ServerConversations
from edgekv.serve.events import Done
from edgekv.serve.job import Job
from edgekv.serve.worker import Worker
from edgekv_lab.bench import synthetic
from tests import archs
from tests.engine import load
from tests.lib import ROOT
from tests.test_products import SHAPES
from tests.test_serve_worker import Log, request

N = 90
"""Tokens of an answer."""


def few(n: int, seed: int = 0) -> list[int]:
    """Tokens that all tiny models have."""
    return np.random.default_rng(seed).integers(6, 106, n).tolist()


class Cheap(Costs):
    """Checking costs nothing."""

    def of(self, most: int) -> list[float]:
        return [1.0] * (most + 1)

    def guessed(self, ms: float) -> None: ...

    def was_read(self, n_tokens: int, ms: float) -> None: ...


def ngrams(drafting: Drafting, costs: Costs) -> Ngrams:
    """Of tokens that spell nothing."""
    return Ngrams(drafting, costs, Words(lambda token: b"", lambda text: []))


class Spelled:
    """Tokens of texts: a word with the space before it, a digit, or signs."""

    def __init__(self) -> None:
        self._texts: list[bytes] = []
        self.words = Words(self._texts.__getitem__, self.tokens)

    def tokens(self, text: bytes) -> list[int]:
        pieces = re.findall(rb"[ ,]?[A-Za-z]+|[0-9]|[^A-Za-z0-9]+?(?= ?[A-Za-z0-9]|$)", text)
        self._texts += [piece for piece in pieces if piece not in self._texts]
        return [self._texts.index(piece) for piece in pieces]


class Known:
    """A source of drafts that knows the answer, and is wrong at some tokens."""

    def __init__(self, n_prompt: int, answer: list[int], n: int = 7) -> None:
        self._n = n
        self.begin(n_prompt, answer)

    def begin(self, n_prompt: int, answer: list[int], n_calls: int = 0) -> None:
        self._n_prompt, self._answer, self.n_calls = n_prompt, answer, n_calls

    def __call__(self, input_ids, /, **_):
        self.n_calls += 1
        begin = len(input_ids) - self._n_prompt
        draft = np.array(self._answer[begin : begin + self._n], np.intc)
        wrong = self.n_calls % (self._n + 2)
        draft[wrong : wrong + 1] ^= 1
        return draft


def written(llm, prompt, n: int = N, **more) -> list[int]:
    answer = llm.generate(list(prompt), **{"temp": 0.0, **more})
    found = [next(answer) for _ in range(n)]
    answer.close()
    return found


def rows(llm):
    """Of every layer and head: which tokens it holds, and their keys and values. Where scores are
    about equal, a rounding decides in which order they lie.
    """
    store, found = llm.engine.store, []
    for il, layer in enumerate(store.layers):
        for k in range(layer.n_head_kv):
            at = np.argsort(store.positions(il, k))
            found.append([x[at] for x in (store.positions(il, k), *store.rows(il, k))])
    return found


NEAR = 0.03
"""Of the logits' standard deviation: farther apart the two likeliest tokens are the same in a pass
of several tokens. It adds up in another order than a pass of one, and a query, a row or a token
that is rounded may fall the other way.
"""


def written_and_seen(llm, prompt, n: int) -> tuple[list[int], list[np.ndarray]]:
    """An answer, and the logits that each of its tokens was drawn from."""
    seen: list[np.ndarray] = []

    def look(input_ids, logits):
        seen.append(logits.copy())
        return logits

    return written(llm, prompt, n, logits_processor=[look]), seen


def check_near(got, seen_too, expected, seen):
    """Tokens, and the logits that each was drawn from, are those without drafts, up to NEAR."""
    n_same = next((i for i, (x, y) in enumerate(zip(got, expected)) if x != y), len(expected) - 1)
    for mine, theirs in zip(seen_too[: n_same + 1], seen):
        assert np.abs(mine - theirs).max() < NEAR * theirs.std()
    last = seen[n_same]
    assert last[expected[n_same]] - last[got[n_same]] < NEAR * last.std()


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen2", "refact"])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_answers_are_those_without_drafts(tiny, name, kind, ratio):
    """200 of them, also where the recent buffer is compressed in the middle."""
    more, source = dict(kv_ratio=ratio, kv_tail=40), Known(0, [])
    alone = load(tiny(name), kind, **more)
    llm = load(tiny(name), kind, **more, draft_model=source)
    for seed in range(13):
        rng = np.random.default_rng(seed)
        prompt = rng.integers(6, 128, rng.integers(70, 250)).tolist()
        expected, seen = written_and_seen(alone, prompt, 50)
        source.begin(len(prompt), expected, seed)
        got, seen_too = written_and_seen(llm, prompt, 50)
        check_near(got, seen_too, expected, seen)
        llm.reset()
        alone.reset()


def has_vnni() -> bool:
    """Whether products with quantised weights have the same bits in a pass of a few tokens."""
    try:
        return "avx512_vnni" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@pytest.mark.skipif(not has_vnni(), reason="there is no kernel for a few tokens here")
@pytest.mark.parametrize("name", ["llama-q4", "llama-32k", "gemma3-q8"])
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("n_prompt", [90, 700])
def test_a_token_has_the_same_bits_whatever_follows_it(tiny, text, name, kind, n_prompt):
    """With a store: a pass of up to 16 tokens is one of each alone."""
    llm, more = load(tiny(name), kind, kv_ratio=0.5, kv_tail=512, n_threads=2), text(16, seed=3)
    llm.eval(text(n_prompt))
    begin, alone = llm.n_tokens, []
    for token in more:
        llm.eval([token])
        alone.append(llm.logits().copy())
    for n in (2, 3, 8, 9, 16):
        assert llm.back_to(begin)
        llm.check(more[0], more[1:n])
        for i in range(n):
            np.testing.assert_array_equal(llm.logits(i - n), alone[i])


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen2", "refact"])
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_a_conversation_with_drafts_goes_on_as_without(tiny, text, name, kind):
    """Also where the recent buffer is compressed and rounded in the middle of an answer."""
    prompt, more = text(300), dict(kv_ratio=0.2, kv_tail=40)
    alone = load(tiny(name), kind, **more)
    expected = written(alone, prompt)
    source = Known(len(prompt), expected)
    llm = load(tiny(name), kind, **more, draft_model=source)
    assert written(llm, prompt) == expected
    assert source.n_calls < N / 2
    assert llm.tokens.tolist() == alone.tokens.tolist()
    for mine, theirs in zip(rows(llm), rows(alone), strict=True):
        np.testing.assert_array_equal(mine[0], theirs[0])
        for x, y in zip(mine[1:], theirs[1:]):
            assert np.mean(np.abs(x - y) > 0.05) < 1e-3  # a rounding may fall the other way
    again = text(30, seed=4)  # a turn that begins behind it
    assert written(llm, [*llm.tokens, *again], 20) == written(alone, [*alone.tokens, *again], 20)


@pytest.mark.parametrize("tail", [30, 2000])
def test_rows_wait_as_without_drafts(tiny, text, tail):
    """Rows of written tokens are halves until they are rounded, which no draft hastens."""
    prompt, kind = text(200), dict(kv_ratio=0.5, kv_tail=tail)
    alone = load(tiny("llama-gqa"), "q4_0", **kind)
    expected = written(alone, prompt, 300)
    llm = load(tiny("llama-gqa"), "q4_0", **kind, draft_model=Known(200, expected, 31))
    assert written(llm, prompt, 300) == expected
    assert llm.engine.store.memory().bytes_now == alone.engine.store.memory().bytes_now


def test_an_answer_that_is_drawn_is_the_one_without_drafts(tiny, text):
    prompt = text(200)
    alone = load(tiny("llama-gqa"), kv_ratio=0.5, seed=7)
    expected = written(alone, prompt, temp=1.0)
    llm = load(tiny("llama-gqa"), kv_ratio=0.5, seed=7, draft_model=Known(200, expected))
    assert written(llm, prompt, temp=1.0) == expected


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_where_an_answer_is_left_nothing_of_a_draft_stays(tiny, text, ratio):
    prompt = text(100)
    expected = written(load(tiny("llama-gqa"), kv_ratio=ratio), prompt)
    for n in (1, 2, 5, 9):
        source = Known(100, expected, 31)
        llm = load(tiny("llama-gqa"), kv_ratio=ratio, draft_model=source)
        assert written(llm, prompt, n) == expected[:n]
        assert llm.tokens.tolist() == [*prompt, *expected[: n - 1]]


def two_tokens(seen: list[int]):
    """Processors that leave two tokens: such texts repeat themselves."""

    def process(input_ids, logits):
        seen.append(len(input_ids))
        out = np.full_like(logits, -np.inf)
        out[[40, 41]] = logits[[40, 41]]
        return out

    return [process]


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_ngrams_of_the_conversation_are_drafts(tiny, text, ratio):
    lengths: list[list[int]] = [[], []]

    alone, llm = (
        load(tiny("llama-gqa"), kv_ratio=ratio, **more) for more in ({}, {"spec_type": "ngram-mod"})
    )
    llm.costs = Cheap()
    expected = written(alone, text(120), 200, logits_processor=two_tokens(lengths[0]))
    assert written(llm, text(120), 200, logits_processor=two_tokens(lengths[1])) == expected
    assert lengths[1] == lengths[0], "a processor sees the answer, not the draft"
    assert llm.n_evaluated > alone.n_evaluated, "nothing was drafted"


def test_auto_guesses_where_the_bits_of_an_answer_stay(tmp_path, tiny, text):
    path = tmp_path / "q4_0.gguf"
    synthetic.write(path, SHAPES["dense"], "q4_0")
    store = {"kv_ratio": 0.3, "kv_method": "snapkv", "kv_min_tokens": 1}
    alone, llm = (load(path, **store, spec_type=kind) for kind in ("none", "auto"))
    if not native.rows_alike(llm.model):
        pytest.skip("there is no kernel for a few tokens here")
    assert (alone.is_drafting, llm.is_drafting) == (False, True)
    llm.costs = Cheap()
    prompt = [*text(150), *text(150)]
    expected = written(alone, prompt, 60, logits_processor=two_tokens([]))
    assert written(llm, prompt, 60, logits_processor=two_tokens([])) == expected
    assert llm.n_evaluated > alone.n_evaluated, "nothing was drafted"
    llm.kv_set(ratio=0.5)
    assert llm.is_drafting
    # llama.cpp's own cache, weights whose products depend on their number, and an archive
    others = [
        (path, {}),
        (tiny("llama-gqa"), store),
        (path, {**store, "kv_archive": str(tmp_path)}),
    ]
    for of, settings in others:
        assert not load(of, spec_type="auto", **settings).is_drafting


def test_the_context_ends_an_answer_as_without_drafts(tiny, text):
    bias = dict.fromkeys((2, 5), float("-inf"))
    said = []
    for more in ({}, {"spec_type": "ngram-mod"}):
        llm = load(tiny("llama-gqa"), kv_ratio=0.5, n_ctx=256, **more)
        llm.costs = Cheap()
        done = llm.create_completion(
            list(text(100)), max_tokens=None, temperature=0.0, logit_bias=bias
        )
        said.append(
            (done["choices"][0]["text"], done["usage"], done["choices"][0]["finish_reason"])
        )
    assert said[0] == said[1]


def answers(tiny, prompts, n_parallel: int, **more):
    llm = load(tiny("llama-gqa"), n_ctx=1024, kv_ratio=0.5, **more)
    llm.costs = Cheap()
    worker = Worker(llm, ServerConversations(llm), n_parallel)
    worker.start()
    try:
        logs = [Log() for _ in prompts]
        for prompt, log in zip(prompts, logs):
            worker.submit(Job(request(prompt, 120, n_probs=2), log))
        return [(log.wait(), log.text) for log in logs], worker.totals
    finally:
        worker.stop()
        worker.join()
        llm.close()


@pytest.mark.parametrize("n_parallel", [1, 3])
def test_a_server_writes_the_same_with_drafts(tiny, text, n_parallel):
    prompts = [[*text(30, seed), *text(30, seed)] for seed in range(3)]
    expected, _ = answers(tiny, prompts, 1)
    got, totals = answers(tiny, prompts, n_parallel, spec_type="ngram-simple")
    assert [said for _, said in got] == [said for _, said in expected]
    assert all(isinstance(done, Done) and done.progress.n_written == 120 for done, _ in got)
    assert 0 < totals.n_right <= totals.n_drafted
    assert totals.n_decodes < 360


def test_a_text_goes_on_as_before():
    guesses = ngrams(Drafting("ngram-simple", 3, 5), Cheap())
    assert guesses.next([1, 2, 3, 4, 5, 6, 7, 1, 2], 9) == []
    assert guesses.next([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], 9) == [4, 5, 6, 7, 1]
    assert guesses.next([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], 2) == [4, 5]
    assert guesses.next([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 9], 9) == []


def test_a_text_that_repeats_itself_goes_on_so():
    guesses = ngrams(Drafting("ngram-mod", 2, 6), Cheap())
    assert guesses.next([9, 1, 2, 1, 2], 9) == [1, 2, 1, 2, 1, 2]


def test_the_place_where_most_tokens_are_the_same_is_taken():
    guesses = ngrams(Drafting("ngram-simple", 2, 3), Cheap())
    text = [9, 8, 1, 2, 50, 51, 52, 7, 1, 2, 60, 61, 62, 9, 8, 1]
    assert guesses.next([*text, 2], 9) == [50, 51, 52]
    assert guesses.next([*text, 2, 50], 9) == [51, 52, 7]
    assert ngrams(Drafting("ngram-simple", 2, 3), Cheap()).next([*text[2:], 7, 1, 2], 9)[0] == 60


def test_of_a_long_prompt_the_whole_is_searched():
    text = list(range(1000, 4000))
    guesses = ngrams(Drafting("ngram-simple", 2, 3), Cheap())
    assert guesses.next([*text, 1003, 1004], 9) == [1005, 1006, 1007]


def test_rows_with_other_words_in_the_same_places_are_alike():
    # each word is new, so no two tokens before what follows it stood together before
    def row(i: int) -> list[int]:
        return [1, 2, 3, 1000 + i, 4, 5, 6, 7, 2000 + i, 3000 + i, 8, 9]

    text = [*row(0), *row(1), *row(2)[:5]]
    assert ngrams(Drafting("ngram-simple"), Cheap()).next(text, 3) == [5, 6, 7]
    costs = Costs()
    costs.took(1, 10.0)
    costs.took(2, 14.0)
    guesses = ngrams(Drafting("ngram-simple"), costs)
    tokens = [token for i in range(12) for token in row(i)]
    drafts = [guesses.next(tokens[: i + 1], 9) for i in range(len(tokens))]
    # drafts of the last rows end before a word, which was not foreseen in the rows before
    ends = [drafts[11 * 12 + i] for i in (0, 4, 10)]
    assert ends == [[2, 3], [5, 6, 7], [9, 1, 2, 3]]


NAMES = "Rosa Finn Bo Quin Kim Otto Lea Hana Ada Jo".split()
FORMS = {
    "a table": "{},{},{},{}",
    "a list": "- id: {}\n  name: {}\n  age: {}\n  code: {}",
    "JSON": '  {{"id": {}, "name": "{}", "age": {}, "code": {}}},',
    "sentences": "{}. The member {} is {} years old and has the code {}.",
}


@pytest.mark.parametrize("to", ["JSON", "sentences", "a table"])
@pytest.mark.parametrize("of", ["a table", "a list", "JSON"])
def test_words_of_a_table_are_foreseen_in_another_form(of, to):
    rng, spelled = np.random.default_rng(0), Spelled()
    rows = [(i + 7, NAMES[i], *rng.integers(9, 9999, 2)) for i in range(10)]
    text = ["\n".join(FORMS[form].format(*row) for row in rows) for form in (of, to)]
    prompt = spelled.tokens(f"Here it is:\n{text[0]}\n\nGive me {to}.".encode())
    answer = spelled.tokens(text[1].encode())
    costs = Costs()
    costs.took(1, 10.0)
    costs.took(2, 10.5)
    guesses = Ngrams(Drafting("ngram-simple"), costs, spelled.words)
    guesses.next(prompt, 9)
    drafts = [guesses.next(prompt + answer[:i], 15) for i in range(1, len(answer))]
    is_right = [bool(draft) and draft[0] == x for draft, x in zip(drafts, answer[1:])]
    n = len(answer) * 6 // 10
    assert np.mean(is_right[n:]) > 0.9
    # and several words of one draft
    right = [draft == answer[1:][i : i + len(draft)] for i, draft in enumerate(drafts)][n:]
    assert np.mean([len(draft) * is_all for draft, is_all in zip(drafts[n:], right)]) > 5


def test_a_word_gets_the_signs_of_another_one():
    # as vocabularies that put a space in front of a text
    texts = [b" a", b"a", b",b", b" b", b"-b", b" c", b"7"]

    def tokens(text: bytes) -> list[int]:
        given = b" " + text
        return [texts.index(given)] if given in texts else [*map(texts.index, [b" a", b" c"])]

    words = Words(texts.__getitem__, tokens)
    assert words.split(2) == (b",", b"b")
    assert words.split(6) == (b"", b"7")
    assert words.alike(2, like=0) == 3
    assert words.alike(2, like=1) is None
    assert words.alike(0, like=2) is None


def test_guesses_that_are_wrong_are_checked_no_more():
    costs = Costs()
    costs.took(1, 10.0)
    costs.took(2, 10.5)
    guesses = ngrams(Drafting("ngram-simple", 2), costs)
    rng, tokens, n = np.random.default_rng(0), [], []
    for _ in range(60):
        tokens += [1, 2, 3, 4, int(rng.integers(100, 2**20))]
        n.append(len(guesses.next(tokens[:-1], 9)))
    assert n[1] > 0 and not any(n[-20:])


def test_a_pass_costs_what_it_took_of_late():
    costs = Costs()
    assert costs.of(2) == [0, 1, 1]
    costs.took(1, 10.0)
    assert costs.of(3) == [0, 10, 10.5, 11]
    costs.took(5, 30.0)
    assert costs.of(6) == [0, 10, 15, 20, 25, 30, 30.5]
    costs.took(5, 20.0)
    assert costs.of(5)[5] == pytest.approx(27)


@pytest.mark.parametrize("wrong", [{"spec_type": "ngram-cache"}, {"spec_ngram_size_n": 0}])
def test_drafts_that_there_are_not_are_refused(tiny, wrong):
    with pytest.raises(BadInput, match="draft"):
        load(tiny("llama-gqa"), **wrong)


def test_a_draft_and_the_token_before_it_have_the_same_bits_as_alone():
    header = (ROOT / "native/src/cpu/edgekv-cpu.h").read_text()
    assert MOST + 1 == int(re.search(r"#define EDGEKV_ALIKE_MAX (\d+)", header)[1])


HYBRIDS = ("falcon-h1", "granitehybrid$", "lfm2$", "^qwen35$")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """hybrid(name): the path of a tiny model with recurrent layers."""

    def make(name):
        return min(archs.write(tmp_path_factory.mktemp("archs"), name).glob("*.gguf"))

    return cache(make)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_answers_of_hybrids_are_those_without_drafts(hybrid, name, kind, ratio):
    """Also where the recent buffer is compressed in the middle, and in a turn behind it."""
    prompt, more = few(150), dict(kv_ratio=ratio, kv_tail=64)
    source = Known(len(prompt), [])
    alone = load(hybrid(name), kind, **more)
    expected, seen = written_and_seen(alone, prompt, N)
    source.begin(len(prompt), expected)
    llm = load(hybrid(name), kind, **more, draft_model=source)
    got, seen_too = written_and_seen(llm, prompt, N)
    check_near(got, seen_too, expected, seen)
    assert source.n_calls < N
    llm.settle()
    assert state.n_cached(llm) == llm.n_tokens
    turn = [*prompt, *expected[:-1], *few(20, 4)]
    expected, seen = written_and_seen(alone, turn, 20)
    source.begin(len(turn), expected)
    check_near(*written_and_seen(llm, turn, 20), expected, seen)
