"""The basis of quantised keys: their scale, the bias they are stored without, and what sees whole
keys.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgekv.errors import EdgeKVError
from tests import lib
from tests.engine import job, load, logits, positions, random_profile, read, stored
from tests.reference.cache import hadamard
from tests.reference.model import Reference

MODEL, UNEVEN, N_PROMPT = "qwen2-bias", "qwen3-uneven", 500


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("name", [MODEL, UNEVEN])
def test_stored_keys_are_whole_ones_scaled_and_without_the_mean_of_the_bias(tiny, text, name, kind):
    llm = load(tiny(name), kind, kv_ratio=0.5, after=text(N_PROMPT))
    store = llm.engine.store
    reference = Reference(tiny(name), kind, kind)
    w = reference.weights
    turn = hadamard(w.d_head).double().numpy()
    for il in range(w.n_layer):
        for head in range(w.n_head_kv):
            scale, centre = (
                x(il)[head, 0].double().numpy() for x in (reference.scale, reference.centre)
            )
            assert scale.max() / scale.min() > 2
            whole = store.rows(il, head)[0] @ turn
            expected = (scale * (whole - centre)) @ turn
            found = stored(store, il, head)[0]
            assert np.abs(found - expected).max() < 1e-3 * np.abs(scale * whole).max()


@pytest.mark.parametrize(
    ("name", "kind", "share"),
    [(MODEL, "q8_0", 0.1), (MODEL, "q5_1", 0.1), (MODEL, "q4_0", 0.1)]
    + [(UNEVEN, "q5_1", 0.5), (UNEVEN, "q4_0", 0.5)],  # 8 bits of queries are what is left
)
def test_answers_are_nearer_to_those_of_f16(tiny, text, nmse, name, kind, share):
    path, prompt, more = tiny(name), text(N_PROMPT), text(5, seed=1)
    exact = read(load(path, kv_ratio=0.99), prompt, more)
    llm = load(path, kind, kv_ratio=0.99)
    assert any(layer.has_basis for layer in llm.engine.store.layers)
    near = nmse(read(llm, prompt, more), exact)
    plain = load(path, kind, kv_ratio=0.99)
    plain.engine.store.make_plain()
    assert plain.engine.store.plain
    assert near < share * nmse(read(plain, prompt, more), exact)


def test_with_its_bias_a_full_cache_is_that_of_llama_cpp(tiny, text, nmse, stock_lib):
    from edgekv_lab.eval.reader import Reader

    path, prompt = tiny(MODEL), text(N_PROMPT)
    llm = load(path, "q8_0", kv_ratio=0.5)
    reader = Reader(llm, ["full", "snapkv"])
    reader.read(prompt)
    for name, plain in (("full", True), ("snapkv", False), ("full", True)):
        reader.compress(name, 1.0 if name == "full" else 0.5)
        assert llm.engine.store.plain is plain
        if plain:
            with_bias = reader.logits
    stock = lib.run(stock_lib, [job(path, "q8_0", prompt, ())])[0][0]
    # llama.cpp's attention rounds queries to 8 bits, so the reference says how far that is
    exact, rounded = (
        Reference(path, "q8_0", "q8_0", how, whole_keys=True).prefill(prompt).logits[-1].numpy()
        for how in (False, True)
    )
    assert nmse(with_bias, stock) < 2 * nmse(exact, stock) + nmse(rounded, exact)


@pytest.mark.parametrize("name", [MODEL, UNEVEN])
@pytest.mark.parametrize("method", ["keydiff", "knorm", "expected", "kvzip", "snapkv", "kvzap"])
def test_scores_are_those_of_whole_keys(tiny, text, tmp_path, name, method):
    """8 bits in the basis and f16 without it are near enough for nearly the same rows."""
    more = {}
    if method == "kvzap":
        more["kv_profile"] = str(tmp_path / "p.gguf")
        random_profile(tiny(name), tmp_path / "p.gguf", "halves")
    kept = [
        [head for layer in positions(llm) for head in layer]
        for llm in (
            load(tiny(name), kind, kv_budget=150, kv_method=method, after=text(N_PROMPT), **more)
            for kind in ("q8_0", "f16")
        )
    ]
    same = [len(np.intersect1d(a, b)) / len(a) for a, b in zip(*kept, strict=True)]
    assert min(same) > 0.95


def test_a_saved_conversation_goes_on(tiny, text):
    llm = load(tiny(MODEL), "q8_0", kv_ratio=0.5, after=text(N_PROMPT))
    state = llm.save_state()
    llm.eval(list(text(3, seed=1)))
    before = logits(llm)
    other = load(tiny(MODEL), "q8_0", kv_ratio=0.5)
    other.load_state(state)
    other.eval(list(text(3, seed=1)))
    assert np.array_equal(logits(other), before)


def test_rows_without_the_bias_are_not_read_as_rows_with_it(tiny, text):
    llm = load(tiny(MODEL), "q8_0", kv_ratio=0.5, after=text(N_PROMPT))
    with pytest.raises(EdgeKVError, match="there are keys already"):
        llm.engine.store.make_plain()
    state = llm.save_state()
    other = load(tiny(MODEL), "q8_0", kv_ratio=0.5)
    other.engine.store.make_plain()
    with pytest.raises(Exception, match="state"):
        other.load_state(state)


def test_a_written_row_is_read_again(tiny, text):
    llm = load(tiny(MODEL), "q8_0", kv_ratio=0.5, after=text(N_PROMPT))
    store = llm.engine.store
    k, v = store.rows(0, 1)
    some = np.array([3, 7], np.int32)
    store.write(0, 1, some, k[:2], v[:2])
    again, _ = store.rows(0, 1)
    step = np.abs(stored(store, 0, 1)[0][some]).max() / 127
    assert np.abs(again[some] - k[:2]).max() <= step


@pytest.mark.parametrize(
    ("name", "kind"), [("llama-gqa", "q8_0"), ("phi3", "q4_0"), (MODEL, "f16"), (UNEVEN, "f16")]
)
def test_models_without_bias_and_norm_and_f16_are_left_alone(tiny, name, kind):
    llm = load(tiny(name), kind, kv_ratio=0.5)
    assert not any(layer.has_basis for layer in llm.engine.store.layers)
