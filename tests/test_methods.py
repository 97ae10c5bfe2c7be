"""methods: one table of cases for what holds for all of them, then what is special to each."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv import methods
from edgekv.budget import uniform
from edgekv.errors import BadInput
from edgekv.methods import LayerStats, Preset, get, presets
from edgekv.methods.snapkv import SnapKVParams, max_pool
from edgekv.select import keep

ALL = pytest.mark.parametrize("name", sorted(methods.REGISTRY))


def layer(n_new: int = 60, n_old: tuple[int, ...] = (0, 0), seed: int = 0, il: int = 1, key: int = 0) -> LayerStats:
    """A layer whose heads kept `n_old` rows of n_seen - n_new earlier tokens, in no particular order."""
    rng = np.random.default_rng(key)
    n_head, before = len(n_old), 3 * max(n_old)
    n_rows = max(n_old) + n_new
    pos = np.full((n_head, n_rows), -1, np.int32)
    for k, n in enumerate(n_old):
        pos[k, :n] = rng.permutation(before)[:n]
        pos[k, n : n + n_new] = before + np.arange(n_new)
    stats = {name: rng.random(pos.shape, dtype=np.float32) for name in methods.STATS}
    for array in stats.values():
        array[pos < 0] = np.nan  # padding is meaningless: a method must not let it through
    return LayerStats(il, 4, n_head, n_rows, np.array(n_old, np.int32), n_new, pos, **stats, seed=seed)


@ALL
@pytest.mark.parametrize("n_old", [(0, 0), (5, 17), (1, 0)])
@pytest.mark.parametrize("n_new", [1, 3, 60])
def test_a_score_for_every_row_and_none_for_padding(name, n_old, n_new):
    stats = layer(n_new, n_old)
    scores = get(name).score.score(stats)
    assert scores.dtype == np.float32 and scores.shape == stats.pos.shape
    assert np.isfinite(scores[stats.pos >= 0]).all() and (scores[stats.pos < 0] == -np.inf).all()


@ALL
@given(count=st.integers(0, 90), old=st.integers(0, 20), key=st.integers(0, 99))
def test_what_survives_scored_highest(name, count, old, key):
    stats = layer(60, (old, 7), key=key)
    scores = get(name).score.score(stats)
    for k, rows in enumerate(keep(scores, [count, count], stats.pos, stats.n_seen, sink=0, window=0)):
        exist = np.flatnonzero(stats.pos[k] >= 0)
        gone = np.setdiff1d(exist, rows)
        assert len(rows) == min(count, len(exist))
        if len(rows) and len(gone):
            assert scores[k, rows].min() >= scores[k, gone].max()


@ALL
def test_scores_do_not_depend_on_the_order_of_the_rows(name):
    stats = layer(40, (12, 12))
    order = np.random.default_rng(1).permutation(stats.n_rows)
    arrays = {name: getattr(stats, name)[:, order] for name in ("pos", *methods.STATS)}
    turned = LayerStats(stats.il, 4, 2, stats.n_rows, stats.n_old, stats.n_new, **arrays)
    preset = get(name)
    np.testing.assert_array_equal(preset.score.score(turned), preset.score.score(stats)[:, order])


@ALL
def test_a_preset_says_what_it_is(name):
    preset = get(name)
    assert preset.name == name and preset.title and "\n" not in preset.title
    assert preset.keeps_all == (name == "full")
    assert preset.budget.name and preset.budget.title


@ALL
def test_a_method_uses_only_what_it_asked_for(name):
    stats = layer()
    asked = get(name).score.observe.stats
    less = LayerStats(**{**vars(stats), **{s: None for s in methods.STATS if s not in asked}})
    np.testing.assert_array_equal(get(name).score.score(less), get(name).score.score(stats))


def test_random_is_seeded_per_layer_and_stable_over_turns():
    score = get("random").score.score
    a, b = score(layer(60)), score(layer(60, seed=1))
    assert (a == score(layer(60))).all() and (a != b).any() and (a != score(layer(60, il=2))).any()
    assert (score(layer(90))[:, :60] == a).all()
    assert score(layer(seed=-1)).shape == a.shape


def test_streaming_keeps_the_sinks_and_the_most_recent():
    stats = layer(100)
    rows = keep(get("streaming").score.score(stats), [50, 50], stats.pos, 100, sink=4, window=32)[0]
    assert sorted(stats.pos[0, rows].tolist()) == [0, 1, 2, 3, *range(54, 100)]


@given(st.integers(1, 50), st.integers(0, 6), st.integers(0, 99))
def test_max_pool_is_the_plain_loop(n, side, key):
    x = np.random.default_rng(key).standard_normal((2, n)).astype(np.float32)
    expected = [[x[k, max(0, j - side) : j + side + 1].max() for j in range(n)] for k in range(2)]
    np.testing.assert_array_equal(max_pool(x, 2 * side + 1), np.array(expected, np.float32))


def test_snapkv_pools_by_token_index():
    """An earlier turn's row is pooled with the tokens next to it that still exist, wherever they are stored."""
    pos = np.array([[20, 3, 4, 30, 31, 32, 33, 34]], np.int32)
    mean = np.array([[0.9, 0.1, 0.3, 0.0, 0.5, 0.0, 0.0, 0.2]], np.float32)
    stats = LayerStats(0, 1, 1, 8, np.array([3], np.int32), 5, pos, mean=mean)
    expected = np.array([[0.9, 0.3, 0.3, 0.5, 0.5, 0.5, 0.5, 0.5]], np.float32)
    np.testing.assert_array_equal(get("snapkv").score.score(stats), expected)
    np.testing.assert_array_equal(get("snapkv").score.score(stats, SnapKVParams(kernel=1)), mean)


def test_an_unknown_method_is_one_line_with_the_choice():
    with pytest.raises(BadInput, match="snapkv") as caught:
        get("h2o2")
    assert "\n" not in str(caught.value)


def test_other_packages_add_methods(monkeypatch, caplog):
    found = [
        EntryPoint("mine", "tests.test_methods:MINE", methods.GROUP),
        EntryPoint("broken", "tests.no_such_module:x", methods.GROUP),
        EntryPoint("snapkv", "tests.test_methods:MINE", methods.GROUP),
    ]
    monkeypatch.setattr(methods, "entry_points", lambda group: found)
    methods._plugins.cache_clear()
    try:
        assert get("mine") is MINE and list(presets()) == [*methods.REGISTRY, "mine"]
        assert get("snapkv").score.name == "snapkv"
        assert "'broken'" in caplog.text
    finally:
        methods._plugins.cache_clear()


MINE = Preset("mine", get("streaming").score, uniform, "for the test")
