"""Latent attention (MLA): one KV head for all query heads, whose V is the beginning of its K."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv.engine.observer import QueryObserver
from edgekv.errors import BadInput, Unsupported
from edgekv.memory.footprint import f16_full_bytes
from edgekv.model.blueprint import Blueprint
from tests import mla
from tests.build import run
from tests.engine import MAX_NMSE, TYPES, feed, load, logits, random_profile, read
from tests.lib import nmse
from tests.test_archs import ALL, METHODS, SMALL, cancelled, plain, tokens
from tests.test_device import compare
from tests.test_native import check_passed, program

SHAPES = {
    "small": ("deepseek2", 4, 64, 32),
    "temperature": ("mistral4", 4, 64, 32),
    "glm-4.7-flash": ("deepseek2", 20, 512, 64),
    "deepseek-v3": ("deepseek2", 128, 512, 64),
}
"""Architecture, query heads, latent values and rotated ones, of which real models have as many."""


@pytest.fixture(scope="module")
def latent(tmp_path_factory) -> Callable[[str], Path]:
    """latent(name): path of a model of SHAPES."""
    here = tmp_path_factory.mktemp("mla")
    return cache(lambda name: mla.write(here / f"{name}.gguf", *SHAPES[name]))


def v_is_in_k(llm: Any) -> bool:
    """Whether each stored V is the beginning of its K, and there are some."""
    found = []
    for il, info in enumerate(llm.engine.store.layers):
        k, v = llm.engine.store.rows(il, 0)
        found.append(len(v) > 0 and np.array_equal(k[:, : info.d_v], v))
    return all(found)


def conversation(path: Path, kind: str) -> float:
    """The largest NMSE against llama.cpp's own cache: of two prompts, each cancelled before, of
    tokens behind them, some of which the buffer does not hold, and of a state that was loaded.
    """
    llm = load(path, kind, kv_budget=ALL, kv_tail=40, kv_window=8, **SMALL)
    reference = plain(path, kind)
    assert llm.engine is not None and llm._kv_note == ""
    found = []
    for seed, n_more in ((1, 45), (2, 4)):
        prompt, more = tokens(llm, 70, seed), tokens(llm, n_more, seed + 10)
        assert cancelled(llm, prompt)
        found.append(nmse(read(llm, prompt, more), read(reference, prompt, more)))
    assert llm.engine.by_layer and llm.engine.turn.past.compressed_at > 70
    saved = llm.save_state()
    llm.reset()
    llm.load_state(saved)
    more = tokens(llm, 4, 20)
    found.append(nmse(feed(llm, more), feed(reference, more)))
    assert v_is_in_k(llm)
    return max(found)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x == "deepseek-v3" else ()) for x in SHAPES]
)
def test_what_keeps_everything_answers_as_llama_cpp_does(latent, name, kind):
    """Upstream rounds queries to q8_0 where the cache has that type."""
    assert conversation(latent(name), kind) < (1e-5 if kind == "f16" else MAX_NMSE["q8_0"])


@pytest.mark.parametrize("name", ["small", "temperature"])
def test_the_rows_are_those_that_llama_cpp_stores(latent, name, monkeypatch):
    """Attended to by llama.cpp's own flash attention, as on a device, they answer alike."""
    monkeypatch.setenv("EDGEKV_ATTEND", "graph")
    assert conversation(latent(name), "q8_0") < 1e-6


@pytest.mark.slow
def test_two_thousand_tokens_behind_a_tail_of_bounded_length(latent):
    path, sizes = latent("temperature"), dict(n_ctx=2560, n_ubatch=64, n_batch=128)
    llm = load(path, kv_budget=ALL, kv_tail=128, kv_window=16, **sizes)
    reference = plain(path, **sizes)
    prompt, more = tokens(llm, 200, 1), tokens(llm, 2000, 2)
    assert nmse(read(llm, prompt, more), read(reference, prompt, more)) < 1e-5
    assert llm.engine.turn.past.compressed_at > 2000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_the_c_api(latent, kind):
    check_passed(run(program("test-engine"), latent("temperature"), TYPES[kind], 1e-3))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the test device needs Linux")
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_on_a_device_only_bytes_are_moved_by_our_kernels(latent, kind):
    result = compare(latent("small"), kind, program("fake-device.so"))
    moved = result["calls"].pop("gather")
    assert moved > 50 and set(result["calls"].values()) == {0}, result
    assert max(result["nmse"].values()) < 1e-6 and min(result["same"].values()) == 1, result
    assert max(result["harm"].values()) == 0, result


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_every_method_runs(latent, kind):
    llm = load(latent("temperature"), kind, kv_ratio=0.2, kv_window=16, **SMALL)
    for method in METHODS:
        llm.reset()
        llm.kv_set(method=method)
        if method == "expected":  # a query is its latent part and its rotated one
            with pytest.raises(Unsupported, match="rotary positions"):
                llm.eval(tokens(llm, 120, 1))
            continue
        llm.eval(tokens(llm, 120, 1))
        feed(llm, tokens(llm, 2, 2))
        llm.eval(tokens(llm, 70, 3))
        assert np.isfinite(logits(llm)).all() and v_is_in_k(llm), method
        assert llm.kv_stats().n_kept < 192


def test_evicted_rows_are_folded_into_keys_and_values_at_once(latent):
    """The merge d2o: what is kept differs from a cache without it, and V follows K."""
    path = latent("small")
    plain_cut, merged = (
        load(path, kv_ratio=0.2, kv_method=f"score=h2o,budget=uniform,merge={merge}", **SMALL)
        for merge in ("none", "d2o")
    )
    for llm in (plain_cut, merged):
        llm.eval(tokens(llm, 200, 1))
    assert v_is_in_k(merged)
    before, after = (llm.engine.store.rows(0, 0)[1] for llm in (plain_cut, merged))
    assert before.shape == after.shape
    changed = (before != after).any(axis=1)
    assert changed.sum() > len(changed) // 4


def test_the_default_with_a_profile_drops_what_it_evicts(latent, tmp_path):
    """A summary's key and value are not made of one row: there is none."""
    path, profile = latent("small"), tmp_path / "profile.gguf"
    random_profile(path, profile)
    options = dict(kv_ratio=0.2, kv_profile=str(profile), n_ctx=512, n_ubatch=64, n_batch=128)
    answers = []
    for method in ("edgekv:recent=0", "kvzap"):
        llm = load(path, "q8_0", kv_method=method, **options)
        llm.eval(tokens(llm, 400, 1))
        assert v_is_in_k(llm)
        answers.append(logits(llm))
    assert np.array_equal(*answers)


def test_a_row_whose_v_is_not_its_k_is_not_written(latent):
    llm = load(latent("small"), kv_ratio=0.5, **SMALL)
    llm.eval(tokens(llm, 120, 1))
    store, info = llm.engine.store, llm.engine.store.layers[0]
    keys = np.ones((1, info.d_k), np.float32)
    values = np.ones((1, info.d_v), np.float32)
    store.write(0, 0, np.array([3], np.int32), keys, values)
    assert np.array_equal(store.rows(0, 0)[0][3], keys[0]) and v_is_in_k(llm)
    with pytest.raises(BadInput, match="beginning of K"):
        store.write(0, 0, np.array([3], np.int32), keys, 2 * values)
    assert np.array_equal(store.rows(0, 0)[0][3], keys[0])


@pytest.mark.parametrize("hidden", ["f32", "whole"])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_the_peak_is_the_one_that_shapes_tell(latent, kind, hidden):
    llm = load(latent("glm-4.7-flash"), kind, kv_ratio=0.3, kv_hidden=hidden, **SMALL)
    kv, prompt = llm.engine, tokens(llm, 200, 1)
    expected = kv.prompt_bytes(QueryObserver(kv.settings, prompt, None), kv.plan(len(prompt)))
    llm.eval(prompt)
    peak = kv.store.memory().bytes_peak
    assert 0.95 * peak < expected.peak - expected.statistics < 1.05 * peak


def test_bytes_are_those_of_k_alone(latent):
    path, d_k, n_layer = latent("glm-4.7-flash"), 576, mla.N_LAYER
    llm = load(path, "q8_0", kv_ratio=0.2, **SMALL)
    llm.eval(tokens(llm, 200, 1))
    stats = llm.kv_stats()
    assert stats.n_bytes_full == 2 * d_k * n_layer * 200
    assert stats.n_bytes_used == int(stats.kept.sum()) * (d_k // 32 * 34)
    assert stats.n_bytes_used == pytest.approx(0.2 * stats.n_bytes_full, rel=0.05)
    assert stats.n_bytes == pytest.approx(stats.n_bytes_used, rel=0.01)
    whole = plain(path).kv_stats()
    assert whole.n_bytes == 2 * d_k * n_layer * 256
    with Blueprint(str(path)) as blueprint:
        context = blueprint.context(True, 256, TYPES["q8_0"], TYPES["q8_0"])
        assert list(context.layers) == llm.engine.store.layers
        assert f16_full_bytes(context.layers, 200) == stats.n_bytes_full
        assert blueprint.shape["v_in_k"] and blueprint.why == ""


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_a_conversation_is_saved_to_a_file_and_loaded(latent, tmp_path, ratio):
    path, file = latent("small"), tmp_path / "conversation.ekv"
    llm = load(path, kv_ratio=ratio, **SMALL)
    llm.eval(tokens(llm, 120, 1))
    llm.kv_save(str(file))
    expected = feed(llm, tokens(llm, 4, 2))
    other = load(path, kv_ratio=ratio, **SMALL)
    other.kv_load(str(file))
    assert np.array_equal(feed(other, tokens(other, 4, 2)), expected)


def test_k_and_v_of_two_types_are_refused_in_one_line(latent):
    with pytest.raises(BadInput, match="different K .* and V .* cache types"):
        load(latent("small"), "f16,q8_0", kv_ratio=0.5, **SMALL)
