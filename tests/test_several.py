"""Several conversations in one pass over the weights: each attends to its own rows."""

from __future__ import annotations

import numpy as np
import pytest

from edgekv import native
from edgekv.conversation import parked
from edgekv.errors import EdgeKVError
from tests.engine import load, positions

N = 4
"""Conversations at once."""


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
    steps = np.random.default_rng(0).integers(6, 128, (30, N)).tolist()
    llm = for_several(tiny(name), kind)
    expected, rows = alone(llm, conversations(llm, text), steps)
    talks = conversations(llm, text)
    for tokens, there in zip(steps, expected):
        native.Place.step(llm.ctx, [talk.place for talk in talks], tokens)
        worst = max(nmse(logits_of(llm, i), x) for i, x in enumerate(there))
        assert worst < (1e-6 if kind == "f16" else 1e-5)  # a rounding may fall the other way
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
