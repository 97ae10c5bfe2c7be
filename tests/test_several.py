"""Several conversations in one pass over the weights: each attends to its own rows."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from edgekv import native
from edgekv.conversation import parked, state
from edgekv.errors import EdgeKVError
from edgekv.native import llama_cpp
from tests import archs
from tests.engine import load, positions

N = 4
"""Conversations at once."""


HYBRIDS = (
    "falcon-h1",
    "granitehybrid$",
    "jamba",
    "kimi-linear",
    "lfm2$",
    "nemotron_h$",
    "^qwen35$",
)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """hybrid(name): the path of a tiny model with recurrent layers."""
    made = {}

    def make(name: str):
        if name not in made:
            folder = archs.write(tmp_path_factory.mktemp("archs"), name)
            made[name] = min(folder.glob("*.gguf"))
        return made[name]

    return make


def few(n: int, seed: int = 0) -> list[int]:
    """Tokens that all tiny models have."""
    return np.random.default_rng(seed).integers(6, 106, n).tolist()


def for_several(path, kind: str = "f16", **more):
    """A model whose context may have tokens of N conversations in a step."""
    llm = load(path, kind, kv_ratio=0.3, kv_tail=512, **more)
    llm.write_together(N)
    return llm


def conversations(llm, text, n: int = N):
    """Parked ones, of different lengths."""
    found = []
    for i in range(n):
        llm.eval(list(text(80 + 90 * i, seed=i)))
        found.append(parked.park(llm))
    return found


def logits_of(llm, i: int) -> np.ndarray:
    return native.logits(llm.ctx, llm.n_vocab(), i).copy()


def alone(llm, talks, steps):
    """[n_steps][n] logits of each conversation's tokens, one after the other, and its rows."""
    found = np.zeros((len(steps), len(talks), llm.n_vocab()), np.float32)
    rows = []
    for i, talk in enumerate(talks):
        assert talk.put(llm)
        for s, tokens in enumerate(steps):
            llm.eval([tokens[i]])
            found[s, i] = llm.logits()
        rows.append([[head.tolist() for head in heads] for heads in positions(llm)])
        llm.reset()
    return found, rows


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen2", "refact"])
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_each_conversation_is_as_alone(tiny, text, nmse, name, kind):
    check_as_alone(for_several(tiny(name), kind), text, nmse, kind)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_each_conversation_of_a_hybrid_is_as_alone(hybrid, nmse, name, kind):
    check_as_alone(for_several(hybrid(name), kind), few, nmse, kind)


def check_as_alone(llm, text, nmse, kind):
    steps = np.random.default_rng(0).integers(6, 106, (30, N)).tolist()
    expected, rows = alone(llm, conversations(llm, text), steps)
    talks = conversations(llm, text)
    for tokens, there in zip(steps, expected):
        native.Place.step(llm.ctx, [talk.place for talk in talks], tokens)
        worst = max(nmse(logits_of(llm, i), x) for i, x in enumerate(there))
        # a rounding may fall the other way: 1.3e-5 with AVX2 alone
        assert worst < (1e-6 if kind == "f16" else 2e-5)
    for talk, expected_rows in zip(talks, rows):
        talk.place.swap(llm.ctx)
        assert [[head.tolist() for head in heads] for heads in positions(llm)] == expected_rows
        talk.place.swap(llm.ctx)


def test_the_one_in_the_context_takes_part_and_goes_on(tiny, text, nmse):
    llm = for_several(tiny("llama-gqa"))
    steps = [[7, 9], [11, 13], [17, 19]]
    expected, _ = alone(llm, conversations(llm, text, 2), steps)
    first, second = conversations(llm, text, 2)
    assert second.put(llm)
    for s, tokens in enumerate(steps[:2]):
        native.Place.step(llm.ctx, [first.place, None], tokens)
        llm.n_tokens += 1
        assert nmse(logits_of(llm, 0), expected[s, 0]) < 1e-6
        assert nmse(logits_of(llm, 1), expected[s, 1]) < 1e-6
    llm.eval([steps[2][1]])
    assert nmse(llm.logits(), expected[2, 1]) < 1e-6


def test_what_cannot_be_is_refused_and_changes_nothing(tiny, text, nmse):
    llm = for_several(tiny("llama-gqa"))
    talks = conversations(llm, text, 2)
    places = [talk.place for talk in talks]
    wrong = [(places[:1] * 2, [7, 8]), ([None] * 6, [7] * 6), (places, [7, 10**6]), ([], [])]
    for there, tokens in wrong:
        with pytest.raises(EdgeKVError):
            native.Place.step(llm.ctx, there, tokens)
    other = for_several(tiny("llama-gqa"))
    with pytest.raises(EdgeKVError, match="another context"):
        native.Place.step(other.ctx, places, [7, 8])
    single = load(tiny("llama-gqa"), kv_ratio=0.3)
    with pytest.raises(EdgeKVError, match="so many"):
        native.Place.step(single.ctx, [None, None], [7, 8])
    expected, _ = alone(llm, conversations(llm, text, 2), [[7, 8]])
    native.Place.step(llm.ctx, places, [7, 8])
    assert all(nmse(logits_of(llm, i), expected[0, i]) < 1e-6 for i in range(2))


def test_recurrent_states_follow_their_conversations(hybrid, nmse):
    """Whoever takes part, in whichever order; they wait between, and one is copied."""
    llm = for_several(hybrid("^qwen35$"))
    steps = np.random.default_rng(1).integers(6, 106, (7, N)).tolist()
    expected, _ = alone(llm, conversations(llm, few), steps)
    talks, n_read = conversations(llm, few), [0] * N
    for chosen in ([0, 1, 2], [2, 0], [3, 2, 0, 1], [1, 3], [3], [0, 3, 2]):
        tokens = [steps[n_read[i]][i] for i in chosen]
        native.Place.step(llm.ctx, [talks[i].place for i in chosen], tokens)
        for at, i in enumerate(chosen):
            assert nmse(logits_of(llm, at), expected[n_read[i], i]) < 1e-6
            n_read[i] += 1
        saved = talks[chosen[-1]].state(llm)
    i = chosen[-1]
    assert talks[0].put(llm)  # in a cell before
    llm.reset()
    assert state.put(llm, saved, is_ours=True)
    llm.n_tokens = llm.engine.store.memory().n_past
    llm.eval([steps[n_read[i]][i]])
    assert nmse(llm.logits(), expected[n_read[i], i]) < 1e-6


def test_the_one_in_the_context_comes_first_of_a_hybrid(hybrid, nmse):
    llm = for_several(hybrid("lfm2$"))
    expected, _ = alone(llm, conversations(llm, few, 2), [[7, 9], [11, 13]])
    first, second = conversations(llm, few, 2)
    assert second.put(llm)
    with pytest.raises(EdgeKVError, match="first"):
        native.Place.step(llm.ctx, [first.place, None], [7, 9])
    native.Place.step(llm.ctx, [None, first.place], [9, 7])
    llm.n_tokens += 1
    assert nmse(logits_of(llm, 0), expected[0, 1]) < 1e-6
    assert nmse(logits_of(llm, 1), expected[0, 0]) < 1e-6
    llm.eval([13])
    assert nmse(llm.logits(), expected[1, 1]) < 1e-6
    first.place.swap(llm.ctx)
    llm.n_tokens = llm.engine.store.memory().n_past
    llm.eval([11])
    assert nmse(llm.logits(), expected[1, 0]) < 1e-6


def test_a_step_that_stops_half_way_loses_those_with_recurrent_states(hybrid, nmse):
    llm = for_several(hybrid("^qwen35$"))
    expected, _ = alone(llm, conversations(llm, few, 3), [[7, 8, 9]])
    one, other, apart = conversations(llm, few, 3)
    native.Place.step(llm.ctx, [apart.place], [9])
    assert nmse(logits_of(llm, 0), expected[0, 2]) < 1e-6
    assert one.put(llm)
    stop = llama_cpp.ggml_abort_callback(lambda data: True)
    llama_cpp.llama_set_abort_callback(llm.ctx, stop, None)
    with pytest.raises(EdgeKVError):
        native.Place.step(llm.ctx, [None, other.place], [7, 8])
    llama_cpp.llama_set_abort_callback(llm.ctx, llama_cpp.ggml_abort_callback(), None)
    assert llm.engine.store.memory().n_past == 0
    llm.reset()
    with pytest.raises(EdgeKVError, match="lost"):
        other.place.swap(llm.ctx)
    with pytest.raises(EdgeKVError, match="lost"):
        native.Place.step(llm.ctx, [other.place], [8])
    apart.place.swap(llm.ctx)
    assert llm.engine.store.memory().n_past == 80 + 90 * 2 + 1


def test_a_model_whose_graph_takes_one_sequence_is_refused(hybrid):
    with pytest.raises(EdgeKVError, match="one by one"):
        for_several(hybrid("plamo2"))


def test_a_context_that_takes_the_place_of_another_is_for_as_many(tiny):
    with load(tiny("llama-gqa"), kv_ratio=0.3, n_seq_max=N + 1) as llm:
        llm.renew_context()
        assert llm.context_params.n_seq_max == N + 1 and llm.context_params.kv_unified


@pytest.mark.parametrize("ratio, n", [(0.3, N + 1), (1, 1)])
def test_a_copy_is_for_as_many(tiny, ratio, n):
    """An uncompressed context would be shared out among them."""
    with load(tiny("llama-gqa"), kv_ratio=ratio) as llm:
        llm.write_together(N)
        with pickle.loads(pickle.dumps(llm)) as copy:
            assert copy.context_params.n_seq_max == n and copy.n_ctx() == llm.n_ctx()
