"""New rows wait in f16 behind a quantised cache before they are rounded to its types."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from edgekv.conversation import parked
from edgekv.memory.limit import RECENT, RECENT_STAY, RECENT_STEP
from tests.engine import feed, load, logits, read

N_PROMPT, NAME = 400, "llama-gqa"
KINDS = ["q4_0", "q8_0,q4_0", "q4_0,f16"]


def errors(llm, exact, il: int = 0, head: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """[n_new] How far the new rows of a head are from those of a cache in f16, as a share of them.

    In layer 0, where the rows of a token do not depend on what the cache keeps.
    """
    found = []
    for mine, theirs in zip(llm.engine.store.rows(il, head), exact.engine.store.rows(il, head)):
        n = llm.n_tokens - N_PROMPT
        mine, theirs = mine[-n:], theirs[-n:]
        found.append(((turned(mine) - theirs) ** 2).sum(1) / (theirs**2).sum(1))
    return found[0], found[1]


def turned(rows: np.ndarray) -> np.ndarray:
    """Rows without the rotation of a quantised cache, in blocks of 64."""
    from tests.reference.cache import hadamard

    blocks = rows.reshape(len(rows), -1, 64) @ hadamard(64).numpy()
    return blocks.reshape(rows.shape)


def continued(path, kind, text, n: int):
    """A conversation with n tokens behind its prompt."""
    llm = load(path, kind, kv_ratio=0.3, kv_method="snapkv", kv_tail=1024)
    llm.eval(list(text(N_PROMPT)))
    append(llm, text(n, seed=1))
    return llm


def append(llm, tokens) -> None:
    """A few at a time: more would be read as a prompt."""
    for i in range(0, len(tokens), 32):
        llm.eval(list(tokens[i : i + 32]))


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q8_0,q4_0"])
def test_the_newest_rows_are_halves_and_older_ones_are_rounded(tiny, text, kind):
    n = 320
    llm, exact = (continued(tiny(NAME), k, text, n) for k in (kind, "f16"))
    for error, step in zip(errors(llm, exact), steps(kind)):
        waiting = len(error) - np.argmax(error[::-1] > 1e-6)  # rows behind the last rounded one
        n_waiting = n - waiting
        assert RECENT_STAY <= n_waiting <= RECENT and (n - n_waiting) % RECENT_STEP == 0
        assert error[-n_waiting:].max() < 1e-6
        assert step / 10 < error[:-n_waiting].mean() < step


def steps(kind: str) -> list[float]:
    """NMSE of normal values in these types, of K and V; at most."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4096, 64)).astype(np.float32)
    found = []
    for name in (kind.split(",") * 2)[:2]:
        type_ = gguf.GGMLQuantizationType[name.upper()]
        y = gguf.quants.dequantize(gguf.quants.quantize(x, type_), type_)
        found.append(2 * float(((y - x) ** 2).sum() / (x**2).sum()))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_nearer_to_those_of_f16(tiny, text, nmse, monkeypatch, kind):
    prompt, more = text(N_PROMPT), text(100, seed=1)
    exact = read(load(tiny(NAME), "f16", kv_ratio=0.99), prompt, more)
    near = nmse(read(load(tiny(NAME), kind, kv_ratio=0.99), prompt, more), exact)
    monkeypatch.setenv("EDGEKV_RECENT", "rounded")
    assert near < nmse(read(load(tiny(NAME), kind, kv_ratio=0.99), prompt, more), exact)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_other_types_are_left_alone(tiny, text, monkeypatch, kind):
    prompt, more = text(N_PROMPT), text(20, seed=1)
    llm = load(tiny(NAME), kind, kv_ratio=0.3)
    assert not any(layer.rounds_late for layer in llm.engine.store.layers)
    expected = read(llm, prompt, more)
    monkeypatch.setenv("EDGEKV_RECENT", "rounded")
    assert np.array_equal(read(load(tiny(NAME), kind, kv_ratio=0.3), prompt, more), expected)


@pytest.mark.parametrize("n_new", [1, 64, 150, 330])
@pytest.mark.parametrize("n_back", [1, 40, 300])
def test_tokens_that_are_taken_back_leave_no_trace(tiny, text, n_new, n_back):
    n_back = min(n_back, n_new)
    llm = continued(tiny(NAME), "q4_0", text, n_new)
    before = [llm.engine.store.rows(0, head) for head in range(2)]
    llm.n_tokens -= n_back
    append(llm, text(3, seed=7))
    n = len(before[0][0]) - n_back
    n_same = n if n_new <= RECENT_STAY else n - RECENT  # rows between may have been rounded
    for head, then in enumerate(before):
        for now, rows in zip(llm.engine.store.rows(0, head), then):
            assert len(now) == n + 3 and np.array_equal(now[:n_same], rows[:n_same])
    if n_new > RECENT_STAY:  # what was rounded stays so
        return
    other = continued(tiny(NAME), "q4_0", text, n_new - n_back)
    append(other, text(3, seed=7))
    assert np.abs(logits(other) - logits(llm)).max() < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_behind_rounded_rows_tokens_are_the_same_after_more_that_were_taken_back(tiny, text, kind):
    llm = continued(tiny(NAME), kind, text, 100)
    llm.engine.store.round_rows()
    expected = feed(llm, text(5, seed=3))
    append(llm, text(300, seed=4))
    llm.n_tokens -= 305
    assert np.array_equal(feed(llm, text(5, seed=3)), expected)


@pytest.mark.parametrize("n_new", [10, 100, 190])
def test_a_saved_conversation_goes_on_as_if_it_had_not_been_saved(tiny, text, n_new):
    more = text(5, seed=3)
    expected = feed(continued(tiny(NAME), "q8_0,q4_0", text, n_new), more)
    llm = continued(tiny(NAME), "q8_0,q4_0", text, n_new)
    state = llm.save_state()
    assert np.array_equal(feed(llm, more), expected)
    llm.reset()
    llm.load_state(state)
    assert np.array_equal(feed(llm, more), expected)


def test_a_parked_conversation_comes_back_with_rows_that_wait(tiny, text):
    expected = feed(continued(tiny(NAME), "q4_0", text, 100), text(5, seed=3))
    llm = continued(tiny(NAME), "q4_0", text, 100)
    waits = parked.park(llm)
    llm.eval(list(text(300, seed=9)))
    assert waits.put(llm)
    assert np.array_equal(feed(llm, text(5, seed=3)), expected)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_the_next_prompt_reads_them_and_rounds_them(tiny, text, kind):
    llm = continued(tiny(NAME), kind, text, 100)
    before = llm.engine.store.rows(0, 0)[0]
    llm.eval(list(text(N_PROMPT, seed=2)))
    assert not np.isin(before[-100:, 0], llm.engine.store.rows(0, 0)[0][:, 0]).all(), "they waited"
    assert np.isfinite(logits(llm)).all()
    k, v = llm.engine.store.row_bytes(0, 0)
    stored = llm.engine.store.rows(0, 0)
    type_ = gguf.GGMLQuantizationType[kind.upper()]
    for data, rows in zip((k, v), stored):
        plain = gguf.quants.dequantize(np.frombuffer(data, np.uint8), type_)
        assert np.array_equal(plain.reshape(rows.shape), rows)
